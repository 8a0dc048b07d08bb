"""Answers as transformers' handlers take them: a queue of parts, or all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall, _StreamError
from transformers.utils.chat_parsing import ResponseParser

from ..batching import SpeculativeGenerationOutput
from .answer_logprobs import AnswerLogprobs
from .answers import AnswerPieces, is_cut, may_have_parts, pieces_of
from .errors import unexpected
from .stop_strings import TrimmedPieces
from .tokenizers import LikeTokenizer
from .work_pool import WorkPool


class AnswerStream:
    """
    Puts the parts of an answer into a queue as its tokens come, with the attributes that transformers' handlers read.

    Args:
        pieces (`AnswerPieces`): makes parts from tokens.
        cancel (`Callable`): cancels the request.
        work (`WorkPool`): decodes and parses a long text that is known only at the end.
        logprobs (`AnswerLogprobs`, *optional*): gets the tokens with their log-probabilities.
    """

    def __init__(
        self,
        pieces: AnswerPieces,
        cancel: Callable[[], None],
        work: WorkPool,
        logprobs: AnswerLogprobs | None = None,
    ):
        self.parts: asyncio.Queue[Any] = asyncio.Queue()
        """Text, reasoning and calls; an error ends them, or None."""
        self.total_tokens = 0
        """Number of tokens taken."""
        self._cancel, self._pieces, self._work, self._logprobs = cancel, pieces, work, logprobs
        self._ending: asyncio.Task[None] | None = None
        self._put(pieces.begin())

    def cancel(self) -> None:
        """Cancels the request, and what is done for the end of its text."""
        self._cancel()
        if self._ending is not None:
            self._ending.cancel()

    def take(self, output: SpeculativeGenerationOutput) -> None:
        """Takes a result of the request, with all of its tokens so far."""
        try:
            if self._logprobs is not None:
                self._logprobs.add_all(output, self.total_tokens)
            for token in output.generated_tokens[self.total_tokens :]:
                self.total_tokens += 1
                self._put(self._pieces.add(token))
            if output.is_finished() or output.error is not None:
                self._ending = asyncio.ensure_future(self._end(output.finish_reason == "length", output.error))
        except Exception as error:
            self._put([_StreamError(unexpected(error))])

    async def _end(self, is_cut: bool, error: str | None) -> None:
        try:
            self._put(await self._work.run(self._pieces.end, is_cut, num_tokens=self._pieces.num_waiting))
            if self._logprobs is not None:
                self._logprobs.end(is_cut)
            self._put([None if error is None else _StreamError(error)])
        except Exception as fault:
            self._put([_StreamError(unexpected(fault))])

    def _put(self, parts: list[Any]) -> None:
        for part in parts:
            self.parts.put_nowait(part)


class ParsedAnswers(LikeTokenizer):
    """
    A tokenizer whose `parse_response` gives the parts of an answer as they would be streamed.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        gen_config (`GenerationConfig`): the request's options, with its stop strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, gen_config: GenerationConfig):
        super().__init__(tokenizer)
        self._config = gen_config

    def parse_response(self, tokens: list[int], template: Any, *, prefix: str, tools: Any = None) -> dict[str, Any]:
        """The parts of an answer; see the tokenizer's own method. The reasoning is `thinking`."""
        has_parts = may_have_parts(self._config)
        parser = ResponseParser(template, prefix=prefix, tools=tools) if has_parts else None
        pieces = pieces_of(self._own, self._config, parser)
        parts = [*pieces.begin(), *pieces.add_all(tokens), *pieces.end(is_cut(self._config)), None]
        trimmed = TrimmedPieces(self._config.stop_strings)
        found = [one for part in parts for one in trimmed.take(part)]
        calls = [{"name": one.name, "arguments": one.arguments} for one in found if isinstance(one, ToolCall)]
        return {
            "content": "".join(one for one in found if type(one) is str),
            "thinking": "".join(one for one in found if isinstance(one, ReasoningText)) or None,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
