"""Where in a JSON schema its error is: llguidance says what is wrong, and not where."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote


MOST_SECONDS = 0.2
"""Most seconds of the search, which holds up other requests: it ends at the smallest schema found so far."""
MOST_CHARACTERS = 2**15
"""Most characters of a schema that is tried: nothing ends a trial, which takes a second for a megabyte."""

_WHOLE = "x-whole-schema"
_OF_NAMES = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")

Place = tuple[int | str, ...]


def place_in_schema(schema: Any, reason: str) -> Place:
    """
    The place of the smallest schema in a schema that has its error; empty for the schema itself.

    Args:
        schema: a JSON schema that cannot be followed.
        reason (`str`): llguidance's error.
    """
    place, found, end = Place(), schema, time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        inner = next(
            (one for one in _children(found) if _reason_at(schema, place + one[0], one[1], end) == reason), None
        )
        if inner is None:
            break
        place, found = place + inner[0], inner[1]
    return place


def _children(schema: Any) -> Iterator[tuple[Place, Any]]:
    """The schemas just inside a schema, with their places. Those that others refer to come first."""
    if not isinstance(schema, Mapping):
        return
    for keyword in _OF_NAMES:
        if isinstance(schema.get(keyword), Mapping):
            yield from (((keyword, name), child) for name, child in schema[keyword].items())
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from (((keyword, number), child) for number, child in enumerate(schema[keyword]))
    for keyword in _SINGLE:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield (keyword,), schema[keyword]


def _reason_at(schema: Mapping[str, Any], place: Place, found: Any, end: float) -> str | None:
    """
    The error of a schema at a place, with the whole if it refers to parts of that; None without one, without time, or
    if it is too large to be tried.
    """
    from llguidance import LLMatcher

    if time.monotonic() > end:
        return None
    inner, text = found, json.dumps(found)
    if '"$ref"' in text:
        steps = (quote(str(step).replace("~", "~0").replace("/", "~1"), safe="~") for step in place)
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        inner = {"$ref": f"#/{_WHOLE}/{'/'.join(steps)}", _WHOLE: schema, **definitions}
        text = json.dumps(inner)
    if len(text) > MOST_CHARACTERS:
        return None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(inner))
    return messages[0] if is_error else None
