"""Characters that are none: JSON can write halves of surrogate pairs, which neither tokenizers nor UTF-8 know."""

from __future__ import annotations

from typing import Any

from .bodies import shortened


def check_characters(body: dict[str, Any]) -> None:
    """
    Checks that all strings of a body are text.

    Raises:
        ValueError: if one is not; the error names its place.
    """
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{where}.{escaped(name)}" if where else escaped(name), one) for name, one in value.items()]
            left += [(where or "body", name) for name in value]
        elif isinstance(value, list):
            left += [(f"{where}[{number}]", one) for number, one in enumerate(value)]
        elif isinstance(value, str) and escaped(value) != value:
            raise ValueError(
                f"`{where}` has half of a surrogate pair in it, which is no character: {shortened(value)}. "
                "Give the whole character, or leave it out."
            )


def escaped(text: str) -> str:
    """A text in which halves of surrogate pairs are written out."""
    return text.encode(errors="backslashreplace").decode()
