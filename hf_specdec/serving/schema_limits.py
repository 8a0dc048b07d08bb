"""
How large and how deep JSON schemas and grammars of requests may be. llguidance compiles them by recursion, at some
kilobytes of the stack for each level: where that has an end, the process has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


MOST_CHARACTERS = 2**19
"""Most characters of a JSON schema: it is compiled at some 2 MB a second, which holds up other requests."""
MOST_LEVELS = 500
"""Most objects within each other, also by reference. A stack of 8 MiB, as threads have, is full at 1,000 to 3,000."""
MOST_RULES = 1024
"""Most rules, groups and optional parts of a grammar: each may be within all others. The stack is full at 2,000."""
MOST_STEPS = 300_000
"""Most values that are looked at, of which some are in several definitions."""

_DEFINITIONS = ("$defs", "definitions")
_NAMES = ("$id", "id", "$anchor")
"""Names of schemas, other than their places."""


def check_schema(schema: Any) -> None:
    """
    Checks that a JSON schema is neither too large nor too deep to be compiled.

    Raises:
        ValueError: if it is.
    """
    length = len(json.dumps(schema))
    if length > MOST_CHARACTERS:
        raise ValueError(f"it has {length} characters, but may have {MOST_CHARACTERS}. Use a smaller one")
    depth = _Depths(schema).of_all()
    if depth > MOST_LEVELS:
        raise ValueError(
            f"its parts are within each other {depth} times, also by `$ref`, but may be {MOST_LEVELS} times. Use "
            "fewer definitions that refer to further ones"
        )


def check_grammar(text: str) -> None:
    """
    Checks that a grammar has not so many rules that they may be too deep within each other.

    Raises:
        ValueError: if it has.
    """
    number = sum(map(text.count, (":", "(", "[")))
    if number > MOST_RULES:
        raise ValueError(f"it has {number} colons and brackets, but may have {MOST_RULES}. Use fewer rules")


class _Depths:
    """
    How deep the parts of a schema are within each other if what they refer to is in their place.

    Args:
        schema: the schema.
    """

    def __init__(self, schema: Any):
        self._schema, self._steps = schema, 0
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
        return self._deepest()

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
            if self._steps > MOST_STEPS:
                raise ValueError("its definitions are too large within each other. Use a smaller one")
            if isinstance(one, Mapping):
                yield one, depth
                left += [(part, depth + 1) for part in one.values()]
            elif isinstance(one, list):
                left += [(part, depth) for part in one]

    def _deepest(self) -> int:
        """The levels of the longest chain of references, by Tarjan's algorithm: those in a circle are all in it."""
        order: dict[str, int] = {}
        low: dict[str, int] = {}
        depth: dict[str, int] = {}
        open_ones: list[str] = []
        work = [("#", iter(self._inner["#"]))]
        order["#"] = low["#"] = 0
        open_ones.append("#")
        while work:
            one, inner = work[-1]
            for reference in inner:
                if reference not in order:
                    order[reference] = low[reference] = len(order)
                    open_ones.append(reference)
                    work.append((reference, iter(self._inner[reference])))
                    break
                if reference not in depth:
                    low[one] = min(low[one], order[reference])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[one])
                if low[one] == order[one]:
                    circle = [open_ones.pop()]
                    while circle[-1] != one:
                        circle.append(open_ones.pop())
                    below = [depth[next_one] for each in circle for next_one in self._inner[each] if next_one in depth]
                    total = sum(self._own[each] for each in circle) + max(below, default=0)
                    depth.update(dict.fromkeys(circle, total))
        return depth["#"]


def _at(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference names; None if there is none, as llguidance will say."""
    found = schema
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping) and part in found:
            found = found[part]
        else:
            return None
    return found
