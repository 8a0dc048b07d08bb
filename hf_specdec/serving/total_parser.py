"""transformers' parser of answers by a response template, which reads any text here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from transformers.cli.serving.utils import ToolCall
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import STREAMABLE_PARSERS

from .calls.python_reading import IS_PYTHON, calls_in_python
from .reasoning import FIELDS


MOST_READ = 8192
"""Characters that a parser has read and keeps, until it drops them."""
LEAST_READ = 1024
"""Characters of these that it keeps nevertheless: what a delimiter may look back at."""
MOST_HELD = 256
"""Characters that it holds back because they may begin a delimiter, which may begin with any number of spaces."""


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

    _only_reasons: bool
    """Whether all is content but the reasoning that the text begins with."""
    _has_begun: bool
    """Whether there is text that is none."""

    @classmethod
    def over(
        cls, parser: ResponseParser, only_reasons: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> TotalParser:
        """
        A parser in the state of another one, which has read the prompt.

        Args:
            parser (`ResponseParser`): the other one.
            only_reasons (`bool`): whether all is content but the reasoning that the text begins with.
            tools (`list[dict]`): the request's, of which handlers of older transformers tell their parser nothing.
        """
        own = cls.__new__(cls)
        own.__dict__.update(parser.__dict__)
        own._tool_params = ResponseParser(parser._spec, prefix="", tools=list(tools))._tool_params
        own._opening, own._pieces, own._told_to = "", [own._body], own._pos
        own._only_reasons, own._has_begun = only_reasons, False
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

    def _watchlist(self) -> list[Any]:
        watched = super()._watchlist()
        if not self._only_reasons or self._current != self._implicit_name:
            return watched
        return [] if self._has_begun else [(kind, field) for kind, field in watched if field.name in FIELDS]

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        before = self._body
        super()._accumulate(events, text)
        if self._current is not None and self._spec.fields[self._current].content not in STREAMABLE_PARSERS:
            self._pieces.append(text)
        self._body, self._told_to = before, self._pos + len(text)
        self._has_begun = self._has_begun or self._current == self._implicit_name

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
        super()._open_explicit(events, field, match)
        self._opening, self._told_to = match.group(), match.end()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body, before = self._current, "".join(self._pieces), len(events)
        self._has_begun = self._has_begun or field != self._implicit_name
        self._body = body
        try:
            self._check_tags(field, body)
            super()._close_current(events)
            if field == "tool_calls" and len(events) > before:
                calls = events[-1]["value"] = calls_in(self._in_python(events[-1]["value"]))
                if not self._opening.strip():  # bare JSON, which may be anything
                    self._check_names(calls)
        except Exception:  # whatever a field's parser makes of what a model writes
            del events[before:]
            if field != self._implicit_name:
                body = self._opening + body + self._buffer[self._told_to : self._pos]
            events.append({"type": "raw", "field": field, "text": body})
            self._reset_to_implicit()
        self._pieces.clear()

    def _in_python(self, value: Any) -> Any:
        """What a field of calls has, with calls that are in Python as those of other forms."""
        if IS_PYTHON not in self._spec.fields["tool_calls"].content_args:
            return value
        return self._coerce_tool_calls(calls_in_python(value))

    def _check_names(self, calls: list[ToolCall]) -> None:
        """Raises for calls of functions that the request does not have."""
        if not all(call.name in self._tool_params for call in calls):
            raise ValueError(f"no tool: {calls!r}")

    def _check_tags(self, field: str | None, body: str) -> None:
        """Raises for a region of tags that is cut, or has more than these, which their parser would leave out."""
        spec = None if field is None else self._spec.fields[field]
        if spec is None or spec.content != "xml-inline":
            return
        is_closed = self._told_to < self._pos or spec.close_re is None
        rest = re.sub(spec.content_args["tag_pattern"], "", body, flags=re.DOTALL)
        if not is_closed or rest.strip():
            raise ValueError(f"no tags: {rest!r}")


def calls_in(value: Any) -> list[ToolCall]:
    return [_call(one) for one in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    """A call of a function by its name, with an object of arguments, both of which can be sent. Raises otherwise."""
    name, arguments = value["function"]["name"], value["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
    if not (isinstance(name, str) and name and isinstance(json.loads(text), dict)):
        raise ValueError(f"no call of a function: {value!r}")
    (name + text).encode()
    return ToolCall(name=name, arguments=text)
