"""
How deep JSON schemas and grammars may be. llguidance compiles them by recursion, at some kilobytes of the stack for
each level: where that has an end, the process has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from .chains import longest_chain
from .lark_rules import rules_of


MOST_LEVELS = 500
"""
Most objects of a schema, or rules and groups of a Lark grammar, within each other, also by reference. A stack of
8 MiB, as threads have, is full at 1,000 to 3,000.
"""
MOST_STEPS = 300_000
"""Most values of a schema that are looked at once more, since they are in several definitions."""

_DEFINITIONS = ("$defs", "definitions")
_NAMES = ("$id", "id", "$anchor")
"""Names of schemas, other than their places."""
_DECODER = json.JSONDecoder(parse_int=float)
"""An integer may have more digits than Python converts."""


def check_schema(schema: Any) -> None:
    """
    Checks that a JSON schema is not too deep to be compiled.

    Raises:
        ValueError: if it is.
    """
    depth = _Depths(schema).of_all()
    if depth > MOST_LEVELS:
        raise ValueError(
            f"its parts are within each other {depth} times, also by `$ref`, but may be {MOST_LEVELS} times. Use "
            "fewer definitions that refer to further ones"
        )


def check_lark(text: str) -> None:
    """
    Checks that the rules of a Lark grammar, and the JSON schemas in it, are not too deep to be compiled.

    Raises:
        ValueError: if they are.
    """
    rules = rules_of(text, _DECODER)
    for schema in rules.schemas:
        check_schema(schema)
    depth = longest_chain(rules.levels, rules.inner)
    if depth > MOST_LEVELS:
        raise ValueError(
            f"its rules and groups are within each other {depth} times, but may be {MOST_LEVELS} times. Use fewer "
            "rules that name further ones"
        )


def check_grammar(grammar: str) -> None:
    """
    Checks that no part of a grammar, as `CompiledGrammar` takes it, is too deep to be compiled.

    Raises:
        ValueError: if one is.
    """
    try:
        if not grammar.lstrip().startswith("{"):
            return check_lark(grammar)
        try:
            told = _DECODER.decode(grammar)
        except ValueError:
            return None  # llguidance says what is wrong
        parts = told.get("grammars")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                check_schema(part.get("json_schema"))
                if isinstance(lark := part.get("lark_grammar"), str):
                    check_lark(lark)
    except RecursionError:
        raise ValueError(
            f"arrays and objects in it are too deep within each other. Use at most {MOST_LEVELS} levels"
        ) from None


class _Depths:
    """
    How deep the parts of a schema are within each other if what they refer to is in their place.

    Args:
        schema: the schema.
    """

    def __init__(self, schema: Any):
        self._schema, self._steps, self._most = schema, 0, math.inf
        self._own: dict[str, int] = {}
        """By reference, the levels of what it names, without further references."""
        self._inner: dict[str, list[str]] = {}
        """By reference, the references in what it names."""

    def of_all(self) -> int:
        """
        The depth of the whole. Definitions that refer to each other count with all of their levels, and all objects
        where schemas are referred to by names.
        """
        objects = [one for one, _ in self._objects(self._schema)]
        self._most = 2 * self._steps + MOST_STEPS
        named = any(isinstance(one.get(name), str) for one in objects for name in _NAMES if one is not self._schema)
        references = {one["$ref"] for one in objects if isinstance(one.get("$ref"), str)}
        if references and (named or not all(one == "#" or one.startswith("#/") for one in references)):
            return len(objects)
        left = ["#"]
        while left:
            reference = left.pop()
            if reference not in self._own:
                self._look_at(reference)
                left += self._inner[reference]
        return longest_chain(self._own, self._inner)

    def _look_at(self, reference: str) -> None:
        value = _at(self._schema, reference)
        if reference == "#" and isinstance(value, Mapping):  # definitions count where they are referred to
            value = {name: one for name, one in value.items() if name not in _DEFINITIONS}
        found: dict[str, None] = {}
        deepest = 0
        for one, depth in self._objects(value):
            deepest = max(deepest, depth)
            if isinstance(one.get("$ref"), str):
                found[one["$ref"]] = None
        self._own[reference], self._inner[reference] = deepest, [*found]

    def _objects(self, value: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
        """The objects in a value, itself included, and how many they are within, themselves included."""
        left = [(value, 1)]
        while left:
            one, depth = left.pop()
            self._steps += 1
            if self._steps > self._most:
                raise ValueError("its definitions are too large within each other. Use a smaller one")
            if isinstance(one, Mapping):
                yield one, depth
                left += [(part, depth + 1) for part in one.values()]
            elif isinstance(one, list):
                left += [(part, depth) for part in one]


def _at(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference names; None if there is none, as llguidance will say."""
    found = schema
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping) and part in found:
            found = found[part]
        else:
            return None
    return found
