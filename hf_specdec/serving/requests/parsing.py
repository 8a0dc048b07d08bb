"""The JSON of a request body: which names, numbers and characters it may have."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..characters import cut, escaped, shortened
from ..errors import RequestRefused
from .counting import check_size


MOST_DIGITS = 100
"""Most characters of a number."""

_HALVES = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes the halves of surrogate pairs, which are also characters together."""


@dataclass(frozen=True)
class _Refused:
    """Stands for a value that is refused as soon as its place is known."""

    reason: str


def parsed(content: bytes, content_type: str | None = "application/json") -> dict[str, Any]:
    """
    The body of a request. All of its strings are text, and all of its numbers are finite.

    Args:
        content (`bytes`): the body as it was sent.
        content_type (`str`, *optional*): its media type, as the header says.

    Raises:
        RequestRefused: if it is no JSON object, or one that is nested too deeply, has too many values, has a name
            twice, or has a number or character in it that cannot be used. The message names the place.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestRefused(
            "The body must be a JSON object: its `Content-Type` must be application/json, but is "
            f"{shortened(content_type)}."
        )
    try:
        body = json_of(content.decode())
    except UnicodeDecodeError as error:
        raise RequestRefused(f"The body must be a JSON object: it is no UTF-8 at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        raise RequestRefused(f"The body must be a JSON object: {error}.") from error
    if not isinstance(body, dict):
        raise RequestRefused(f"The body must be a JSON object: it is {shortened(body)}.")
    return body


def json_of(text: str, where: str = "", may_repeat: bool = False) -> Any:
    """
    The value that a JSON text stands for.

    Args:
        text (`str`): the JSON.
        where (`str`): place of the text in the body, for messages.
        may_repeat (`bool`, *optional*, defaults to `False`): whether an object may have a name twice, whose last value
            then counts.

    Raises:
        json.JSONDecodeError: if it is no JSON.
        RequestRefused: if it is nested too deeply, has too many values, has a name twice, or has a number or character
            in it that cannot be used.
    """
    check_size(text.encode(errors="replace"), where or "body")
    refused: list[_Refused] = []

    def number(text: str) -> Any:
        found = _number(text)
        if isinstance(found, _Refused):
            refused.append(found)
        return found

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            name = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            found[name] = _Refused("is given twice. Leave one of them out.")
            refused.append(found[name])
        return found

    hook = None if may_repeat else unique
    value = json.loads(text, parse_int=number, parse_float=number, parse_constant=number, object_pairs_hook=hook)
    if refused or _HALVES.search(text):  # else there is nothing to be found
        check_values(value, where)
    return value


def check_values(value: Any, where: str = "") -> None:
    """
    Checks that all strings of a value are text (JSON can write halves of surrogate pairs), and that nothing in it is
    refused.

    Args:
        value: what JSON stands for.
        where (`str`): its place in the body.

    Raises:
        RequestRefused: if not; the message names the place.
    """
    left: list[tuple[str, Any]] = [(where, value)]
    while left:
        place, one = left.pop()
        if isinstance(one, dict):
            left += [(f"{place}.{_name(name)}" if place else _name(name), each) for name, each in one.items()]
            left += [(place or "body", name) for name in one]
        elif isinstance(one, list):
            left += [(f"{place}[{number}]", each) for number, each in enumerate(one)]
        elif isinstance(one, _Refused):
            raise RequestRefused(f"`{cut(place, 100)}` {one.reason}")
        elif isinstance(one, str) and not one.isascii() and escaped(one) != one:
            raise RequestRefused(
                f"`{cut(place, 100)}` has half of a surrogate pair in it, which is no character: {shortened(one)}. "
                "Give the whole character, or leave it out."
            )


def _name(key: str) -> str:
    return cut(escaped(key), 40)


def _number(text: str) -> Any:
    """The number that a text of JSON, or of what Python takes for JSON, stands for."""
    if len(text) > MOST_DIGITS:
        reason = f"is a number of {len(text)} characters, but may have {MOST_DIGITS}: {cut(text, 40)}. Shorten it."
        return _Refused(reason)
    if text.lstrip("-").isdigit():
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else _Refused(f"must be a finite number, but is {cut(text, 40)}.")
