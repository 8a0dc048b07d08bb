"""The parts of an answer (content, reasoning, tool calls): the same as tokens come, and of all of them at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall, _StreamError
from transformers.utils.chat_parsing import ResponseParser

from ..batching import SpeculativeGenerationOutput
from .errors import unexpected
from .stop_strings import TrimmedPieces
from .text_pieces import TextPieces
from .tokenizers import LikeTokenizer


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


class TotalParser(ResponseParser):
    """
    transformers' parser, which reads any text: a region that is not what its field of the response template says (a
    tool call that is no JSON, or is cut) gives an event `raw` with its text, delimiters included, instead of an error.
    """

    @classmethod
    def over(cls, parser: ResponseParser) -> TotalParser:
        """A parser in the state of another one, which has read the prompt."""
        own = cls.__new__(cls)
        own.__dict__.update(parser.__dict__)
        own._start = len(own._buffer)
        return own

    def end(self) -> list[dict[str, Any]]:
        """The events at the end of the text."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def strips(self, field: str) -> bool:
        """Whether white space around a field's text is left out."""
        return bool(self._spec.fields[field].content_args.get("strip", True))

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
        self._start = match.start()
        super()._open_explicit(events, field, match)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body, before = self._current, self._body, len(events)
        try:
            super()._close_current(events)
            if field == "tool_calls" and len(events) > before:
                events[-1]["value"] = _calls_in(events[-1]["value"])
        except Exception:  # whatever a field's parser makes of what a model writes
            del events[before:]
            raw = body if field == self._implicit_name else self._buffer[self._start : self._pos]
            events.append({"type": "raw", "field": field, "text": raw})
            self._reset_to_implicit()


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
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, parser: ResponseParser | None = None):
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
        self._last = token
        return self._parts_in(self._texts.add(token))

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
        return self._parts_of(self._parser.feed(text))

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
    """

    def __init__(self, pieces: AnswerPieces, cancel: Callable[[], None]):
        self.parts: asyncio.Queue[Any] = asyncio.Queue()
        """Text, reasoning and calls; an error ends them, or None."""
        self.total_tokens = 0
        """Number of tokens taken."""
        self.cancel = cancel
        self._pieces = pieces
        self._put(pieces.begin())

    def take(self, output: SpeculativeGenerationOutput) -> None:
        """Takes a result of the request, with all of its tokens so far."""
        try:
            for token in output.generated_tokens[self.total_tokens :]:
                self.total_tokens += 1
                self._put(self._pieces.add(token))
            if output.is_finished() or output.error is not None:
                self._put(self._pieces.end(output.finish_reason == "length"))
                self._put([None if output.error is None else _StreamError(output.error)])
        except Exception as error:
            self._put([_StreamError(unexpected(error))])

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
        pieces = AnswerPieces(self._own, ResponseParser(template, prefix=prefix, tools=tools))
        parts = pieces.begin()
        for token in tokens:
            parts += pieces.add(token)
        parts += [*pieces.end(is_cut(self._config)), None]
        trimmed = TrimmedPieces(self._config.stop_strings)
        found = [one for part in parts for one in trimmed.take(part)]
        calls = [{"name": one.name, "arguments": one.arguments} for one in found if isinstance(one, ToolCall)]
        return {
            "content": "".join(one for one in found if type(one) is str),
            "thinking": "".join(one for one in found if isinstance(one, ReasoningText)) or None,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
