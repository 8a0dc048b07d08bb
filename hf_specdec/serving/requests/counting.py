"""How many values a JSON text has, and how deep they are within each other, counted before they are made."""

from __future__ import annotations

import numpy as np

from ..errors import RequestRefused


MOST_VALUES = 300_000
"""
Most values of a body, for which Python's parser needs up to 0.2 seconds, in which no other thread runs. Enough for a
`logit_bias` of all tokens of a large vocabulary.
"""
MOST_NESTED = 64
"""Most arrays and objects within each other."""
BLOCK = 2**16
"""Bytes that are looked at together: other threads run between them."""

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_CHANGES = np.zeros(256, np.int8)
"""How a byte outside of strings changes the depth."""
_CHANGES[list(b"[{")], _CHANGES[list(b"]}")] = 1, -1
_BEGINS = np.zeros(256, np.bool_)
"""Whether a byte outside of strings begins another value."""
_BEGINS[list(b"[{,")] = True


def check_size(content: bytes, where: str = "body") -> None:
    """
    Checks how many values a JSON text has, and how deep they are within each other. Brackets and commas in strings are
    none. Takes some hundredths of a second for a few megabytes, whatever they are.

    Args:
        content (`bytes`): the text, right or wrong; of a wrong one, what is before its mistake counts.
        where (`str`): its place in the body, for messages.

    Raises:
        RequestRefused: if there are more than `MOST_VALUES`, or more than `MOST_NESTED` within each other.
    """
    number, depth, is_inside, is_escaped = 1, 0, False, False
    for at in range(0, len(content), BLOCK):
        block = np.frombuffer(content, np.uint8, min(BLOCK, len(content) - at), at)
        quotes, is_escaped = _quotes(block, is_escaped)
        outside = (np.cumsum(quotes) + is_inside) % 2 == 0
        is_inside = not outside[-1]
        number += int(np.count_nonzero(_BEGINS[block] & outside))
        depths = np.cumsum(_CHANGES[block] * outside, dtype=np.int64) + depth
        depth = int(depths[-1])
        if number > MOST_VALUES:
            raise RequestRefused(
                f"`{where}` has more than {MOST_VALUES} values: arrays, objects and what is in them. Send fewer."
            )
        if depths.max() > MOST_NESTED:
            raise RequestRefused(
                f"`{where}` has more than {MOST_NESTED} arrays and objects within each other. Nest it less."
            )


def _quotes(block: np.ndarray, is_escaped: bool) -> tuple[np.ndarray, bool]:
    """Which bytes of a block are quotes that begin or end a string, and whether the first byte after it is escaped."""
    quotes, slashes = block == _QUOTE, block == _BACKSLASH
    if not is_escaped and not slashes.any():
        return quotes, False
    places = np.arange(len(block))
    ends = np.maximum.accumulate(np.where(slashes, -1 - is_escaped, places))  # of what is before a run of backslashes
    runs = places - ends
    before = np.concatenate(([int(is_escaped)], runs[:-1]))
    return quotes & (before % 2 == 0), bool(runs[-1] % 2)
