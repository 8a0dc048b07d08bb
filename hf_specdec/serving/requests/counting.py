"""How many values a JSON text has, counted before they are made."""

from __future__ import annotations

from ..errors import RequestRefused


MOST_VALUES = 300_000
"""
Most values of a body, for which Python's parser needs up to 0.2 seconds, in which no other thread runs. Enough for a
`logit_bias` of all tokens of a large vocabulary.
"""


def check_number_of_values(content: bytes) -> None:
    """
    Checks how many values a JSON text has, before they are made.

    Raises:
        RequestRefused: if there are more than `MOST_VALUES`.
    """
    number, at, length = 1, 0, len(content)
    while at < length:
        quote = content.find(b'"', at)
        end = length if quote < 0 else quote
        number += sum(content.count(sign, at, end) for sign in (b",", b"[", b"{"))
        if number > MOST_VALUES:
            raise RequestRefused(f"The body has more than {MOST_VALUES} values: arrays, objects and what is in them.")
        at = length if quote < 0 else _end_of_string(content, quote) + 1


def _end_of_string(content: bytes, quote: int) -> int:
    """Where a string ends that begins with this quote: at its other one, or at the end of the text."""
    end = content.find(b'"', quote + 1)
    while end >= 0:
        first = end
        while content[first - 1] == ord("\\"):
            first -= 1
        if (end - first) % 2 == 0:
            return end
        end = content.find(b'"', end + 1)
    return len(content)
