"""Text in messages: cut to a length that can be read, and without characters that cannot be sent."""

from __future__ import annotations

import reprlib
from typing import Any


MOST_CITED = 80
"""Most characters of a value that a message cites."""


_BEGINNING = reprlib.Repr()  # of a value of megabytes, all would be written
_BEGINNING.maxlist = _BEGINNING.maxdict = _BEGINNING.maxtuple = 20
_BEGINNING.maxstring = _BEGINNING.maxother = _BEGINNING.maxlong = 2 * MOST_CITED


def escaped(text: str) -> str:
    """A text in which halves of surrogate pairs are written out: neither tokenizers nor UTF-8 know them."""
    return text.encode(errors="backslashreplace").decode()


def shortened(value: Any, length: int = MOST_CITED) -> str:
    """A value for an error message, cut to so many characters."""
    return cut(repr(value[: length + 1]) if isinstance(value, str) else _BEGINNING.repr(value), length)


def cut(text: str, length: int) -> str:
    """A text, or its beginning if it has more characters."""
    return text if len(text) <= length else f"{text[: length - 4]} …"
