"""The parts of an answer (content, reasoning, tool calls): the same as tokens come, and of all of them at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall, _StreamError
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import STREAMABLE_PARSERS

from ..batching import SpeculativeGenerationOutput
from .answer_logprobs import AnswerLogprobs
from .decoding import beside
from .errors import unexpected
from .stop_strings import TrimmedPieces
from .text_pieces import TextPieces
from .tokenizers import LikeTokenizer
from .work_pool import WorkPool


_KINDS: dict[str | None, type[str]] = {
    "content": str,
    "reasoning_content": ReasoningText,
    "thinking": ReasoningText,
    "reasoning": ReasoningText,
}
"""What the text of a field is for clients. Other fields of a response template are none of theirs."""


def is_cut(gen_config: GenerationConfig) -> bool:
    """Whether the request with these options is over, and its text as long as it may be; see `OneRequest`."""
    return gen_config.max_new_tokens == 0


def may_have_parts(gen_config: GenerationConfig) -> bool:
    """
    Whether the answer may have reasoning and calls. With a grammar all of it is content: what the grammar is of,
    whatever the prompt has begun.
    """
    return getattr(gen_config, "grammar", None) is None


def left_out(tokenizer: PreTrainedTokenizerBase, gen_config: GenerationConfig) -> frozenset[int]:
    """Tokens that end the text and are no part of it. (Special ones are left out in any case.)"""
    found = beside(gen_config).left_out
    return found - frozenset(tokenizer.all_special_ids) if found else found


MOST_READ = 8192
"""Characters that a parser has read and keeps, until it drops them."""
LEAST_READ = 1024
"""Characters of these that it keeps nevertheless: what a delimiter may look back at."""
MOST_HELD = 256
"""Characters that it holds back because they may begin a delimiter, which may begin with any number of spaces."""
MOST_FED = 256
"""Characters of a whole text that it is given at once: after each delimiter it searches all of them for others."""


class TotalParser(ResponseParser):
    """
    transformers' parser, which reads any text: a region that is not what its field of the response template says (a
    tool call that is no JSON, or is cut) gives an event `raw` with its text, delimiters included, instead of an error.

    What is fed costs about its own length, however much text was before it. (transformers' parser copies all of that
    twice, and searches all that it holds back, from each of its characters.) So the bodies of regions that are told
    piece by piece are not kept, and of what is held back some is told if it becomes long.
    """

    _buffer: str
    _pos: int
    _body: str
    _opening: str
    """The delimiter that has opened the present region."""
    _pieces: list[str]
    """The body of the present region, if its value is known only at its end."""
    _told_to: int
    """Where in the buffer the present region's body ends so far."""

    @classmethod
    def over(cls, parser: ResponseParser) -> TotalParser:
        """A parser in the state of another one, which has read the prompt."""
        own = cls.__new__(cls)
        own.__dict__.update(parser.__dict__)
        own._opening, own._pieces, own._told_to = "", [own._body], own._pos
        return own

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The events with the next piece of the text."""
        spare = self._pos - LEAST_READ
        if spare > MOST_READ:
            self._buffer = self._buffer[spare:]
            self._pos, self._told_to = LEAST_READ, self._told_to - spare
        events: list[dict[str, Any]] = super().feed(text)
        if len(self._buffer) - self._pos > MOST_HELD:
            end = len(self._buffer) - MOST_HELD // 2
            self._accumulate(events, self._buffer[self._pos : end])
            self._pos = end
        return events

    def end(self) -> list[dict[str, Any]]:
        """The events at the end of the text."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def strips(self, field: str) -> bool:
        """Whether white space around a field's text is left out."""
        return bool(self._spec.fields[field].content_args.get("strip", True))

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        before = self._body
        super()._accumulate(events, text)
        if self._current is not None and self._spec.fields[self._current].content not in STREAMABLE_PARSERS:
            self._pieces.append(text)
        self._body, self._told_to = before, self._pos + len(text)

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
        super()._open_explicit(events, field, match)
        self._opening, self._told_to = match.group(), match.end()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body, before = self._current, "".join(self._pieces), len(events)
        self._body = body
        try:
            self._check_tags(field, body)
            super()._close_current(events)
            if field == "tool_calls" and len(events) > before:
                events[-1]["value"] = _calls_in(events[-1]["value"])
        except Exception:  # whatever a field's parser makes of what a model writes
            del events[before:]
            if field != self._implicit_name:
                body = self._opening + body + self._buffer[self._told_to : self._pos]
            events.append({"type": "raw", "field": field, "text": body})
            self._reset_to_implicit()
        self._pieces.clear()

    def _check_tags(self, field: str | None, body: str) -> None:
        """Raises for a region of tags that is cut, or has more than these, which their parser would leave out."""
        spec = None if field is None else self._spec.fields[field]
        if spec is None or spec.content != "xml-inline":
            return
        is_closed = self._told_to < self._pos or spec.close_re is None
        rest = re.sub(spec.content_args["tag_pattern"], "", body, flags=re.DOTALL)
        if not is_closed or rest.strip():
            raise ValueError(f"no tags: {rest!r}")


def _calls_in(value: Any) -> list[ToolCall]:
    return [_call(one) for one in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    """A call of a function by its name, with an object of arguments, both of which can be sent. Raises otherwise."""
    name, arguments = value["function"]["name"], value["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
    if not (isinstance(name, str) and name and isinstance(json.loads(text), dict)):
        raise ValueError(f"no call of a function: {value!r}")
    (name + text).encode()
    return ToolCall(name=name, arguments=text)


class AnswerPieces:
    """
    Makes the parts of an answer from its tokens: text of the content (`str`) and of the reasoning (`ReasoningText`),
    and calls (`ToolCall`). Joined, the pieces of each kind are what an unstreamed answer has.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        parser (`ResponseParser`, *optional*): reads the parts by the model's response template; has read the prompt,
            and no token yet. By default all text is content.
        left_out (`frozenset[int]`): tokens that are no part of the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: ResponseParser | None = None,
        left_out: frozenset[int] = frozenset(),
    ):
        self._left_out = left_out
        self._tokenizer, self._parser = tokenizer, None if parser is None else TotalParser.over(parser)
        self._texts = TextPieces(tokenizer, skip_special_tokens=parser is None)
        self._last: int | None = None
        self._kind: type[str] | None = None
        """What the text of the present region is; None if it is not told."""
        self._told: set[type[str]] = set()
        self._is_new = self._is_told = self._follows_raw = False
        """Whether the region has told nothing yet, has told its text, and follows raw text."""
        self._space = ""
        """White space that is told if text of the same region, or raw text, follows."""

    def begin(self) -> list[Any]:
        """The parts that the prompt begins."""
        return [] if self._parser is None else self._parts_of(self._parser.initial_events)

    def add(self, token: int) -> list[Any]:
        """The parts that are newly known with the next token."""
        if token in self._left_out:
            return []
        self._last = token
        return self._parts_in(self._texts.add(token))

    def add_all(self, tokens: list[int]) -> list[Any]:
        """The parts of a whole answer."""
        tokens = [token for token in tokens if token not in self._left_out] if self._left_out else tokens
        self._last = tokens[-1] if tokens else None
        return self._parts_in(self._tokenizer.decode(tokens, skip_special_tokens=self._parser is None))

    @property
    def num_waiting(self) -> int:
        """Number of tokens whose text is known only at the end."""
        return self._texts.num_waiting

    def end(self, is_cut: bool) -> list[Any]:
        """
        The last parts.

        Args:
            is_cut (`bool`): whether the text is as long as it may be. Otherwise its last token may be an end token,
                which raw text leaves out.
        """
        parts = self._parts_in(self._texts.rest())
        if self._parser is None:
            return parts
        events = self._parser.end()
        if not is_cut and self._last is not None and self._last in self._tokenizer.all_special_ids:
            end = self._tokenizer.decode([self._last])
            for event in events:
                if event["type"] == "raw":
                    event["text"] = event["text"].removesuffix(end)
        return parts + self._parts_of(events)

    def _parts_in(self, text: str) -> list[Any]:
        if self._parser is None or not text:
            return [text] if text else []
        parts: list[Any] = []
        for at in range(0, len(text), MOST_FED):
            parts += self._parts_of(self._parser.feed(text[at : at + MOST_FED]))
        return parts

    def _parts_of(self, events: list[dict[str, Any]]) -> list[Any]:
        parts: list[Any] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_open":
                self._kind, self._is_new, self._is_told = _KINDS.get(field), True, False
            elif kind == "region_chunk" and not event.get("dirty"):
                parts += self._text(field, event["text"])
            elif kind == "region_close":
                parts += self._closed(field, event["value"])
            elif kind == "raw" and not self._is_told:
                parts.append(self._space + event["text"])
                self._told.add(str)
                self._space, self._follows_raw = "", True
        return parts

    def _text(self, field: str, text: str) -> list[Any]:
        """Text of the present region, without the white space around it."""
        if self._kind is None or self._parser is None:
            return []
        self._is_told = True
        if not self._parser.strips(field):
            self._space = ""
            return self._said(text)
        text = self._space + text
        if self._is_new and not self._follows_raw and text.strip():
            text = ("\n" if self._kind in self._told else "") + text.lstrip()
        told = text.rstrip()
        self._space = text[len(told) :]
        return self._said(told)

    def _said(self, text: str) -> list[Any]:
        if not text or self._kind is None:
            return []
        self._told.add(self._kind)
        self._is_new = self._follows_raw = False
        return [self._kind(text)]

    def _closed(self, field: str, value: Any) -> list[Any]:
        if field == "tool_calls":
            self._space, self._follows_raw = "", False
            return [one for one in value if isinstance(one, ToolCall)]  # others are calls in the prompt
        if self._kind is None:
            return []
        parts = []
        if not self._is_told:  # structured, and known only now
            parts = self._text(field, value if isinstance(value, str) else json.dumps(value))
        if self._kind is ReasoningText:
            self._space = ""
        return parts


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
        pieces = AnswerPieces(self._own, parser, left_out(self._own, self._config))
        parts = [*pieces.begin(), *pieces.add_all(tokens), *pieces.end(is_cut(self._config)), None]
        trimmed = TrimmedPieces(self._config.stop_strings)
        found = [one for part in parts for one in trimmed.take(part)]
        calls = [{"name": one.name, "arguments": one.arguments} for one in found if isinstance(one, ToolCall)]
        return {
            "content": "".join(one for one in found if type(one) is str),
            "thinking": "".join(one for one in found if isinstance(one, ReasoningText)) or None,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
