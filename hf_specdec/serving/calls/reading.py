"""Calls that a grammar has demanded, read letter by letter: what they are made of is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.cli.serving.utils import ToolCall


@dataclass(frozen=True)
class CallPiece:
    """
    A piece of a call.

    Args:
        index (`int`): number of the call in the answer.
        name (`str`, *optional*): the function's name, in the first piece of a call alone.
        arguments (`str`): the next piece of the arguments' JSON.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Demanded:
    """
    Tool calls that a grammar makes of an answer.

    Args:
        keys (`tuple[str, str]`, *optional*): keys of the name and of the arguments, if a call is an object of JSON.
        closing (`str`): what comes after that object.
        is_named (`bool`): whether the request names the function.
        json_keys (`dict[str, frozenset[str]]`): arguments of each function that its tags have as JSON.
        in_pieces (`bool`): whether arguments are told as they come.
    """

    keys: tuple[str, str] | None
    closing: str
    is_named: bool
    in_pieces: bool
    json_keys: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def told(self, call: ToolCall, index: int) -> list[Any]:
        """A complete call, in pieces if that is how calls are told."""
        if keys := self.json_keys.get(call.name):
            found = {
                key: json.loads(value) if key in keys and isinstance(value, str) else value
                for key, value in json.loads(call.arguments).items()
            }
            call = ToolCall(call.name, json.dumps(found))
        return [CallPiece(index, call.name, ""), CallPiece(index, None, call.arguments)] if self.in_pieces else [call]

    def end(self, is_cut: bool) -> list[Any]:
        """What comes after the last call: it says that the text ends because of calls, as it does unless it is cut."""
        return [ToolCall(None, "")] if self.in_pieces and not (is_cut or self.is_named) else []


class CallReader:
    """
    Reads calls that are objects of JSON, with the arguments as they are written. A call that is cut has those that it
    has; if it is cut before its name is known, it is content.

    Args:
        keys (`tuple[str, str]`), demanded (`Demanded`): say what calls are like.
    """

    def __init__(self, keys: tuple[str, str], demanded: Demanded):
        self._keys, self._demanded, self._index = keys, demanded, 0
        self._begin()

    def _begin(self) -> None:
        self._name: str | None = None
        self._arguments, self._raw = "", ""
        """What is not told of the arguments, and of a call whose name is not known."""
        self._depth, self._key, self._string = 0, "", ""
        """How many braces are open; the key of the present value of the call, and the string that is read."""
        self._in_string = self._is_escaped = self._is_value = False

    def feed(self, text: str) -> list[Any]:
        """The parts that are newly known: pieces, and calls that are complete."""
        parts: list[Any] = []
        for letter in text:
            before = self._depth
            if self._in_string:
                parts += self._in_a_string(letter)
            elif letter == '"' and before:
                self._in_string, self._string = True, '"'
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
            elif before == 1 and letter in ":,":
                self._is_value = letter == ":"
            if self._is_value and self._key == self._keys[1] and max(before, self._depth) > 1:
                self._arguments += letter
            if self._name is None:
                self._raw += letter
            if before == 1 and self._depth == 0:
                parts += self._known() if self._demanded.in_pieces else [ToolCall(self._name, self._arguments)]
                self._begin()
                self._index += 1
        return parts + self._known()

    def end(self) -> list[Any]:
        """The last parts."""
        if self._name is not None:
            return [] if self._demanded.in_pieces else [ToolCall(self._name, self._arguments)]
        raw, closing = self._raw, self._demanded.closing
        if self._index and not self._depth:
            raw = "" if closing.startswith(raw) else raw.removeprefix(closing)
        return [raw] if raw.strip() else []

    def _in_a_string(self, letter: str) -> list[Any]:
        self._string += letter
        if self._is_escaped or letter != '"':
            self._is_escaped = letter == "\\" and not self._is_escaped
            return []
        self._in_string = False
        if self._depth > 1:
            return []
        if not self._is_value:
            self._key = json.loads(self._string)
        elif self._key == self._keys[0]:
            self._name = json.loads(self._string)
            return [CallPiece(self._index, self._name, "")] if self._demanded.in_pieces else []
        return []

    def _known(self) -> list[Any]:
        if not (self._demanded.in_pieces and self._arguments and self._name is not None):
            return []
        told, self._arguments = self._arguments, ""
        return [CallPiece(self._index, None, told)]
