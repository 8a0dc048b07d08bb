"""Sizes of CUDA graphs, few enough that steps of other sizes fit into graphs that there are."""

from __future__ import annotations

from bisect import bisect_left


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows, and queries per row, of captured graphs: the next size is at most 1.5 times the number needed."""
FEWEST_BLOCKS = 64
"""Block tables are padded to this number of blocks, or to the next power of two if larger."""


def next_size(number: int) -> int:
    """The smallest of `SIZES`, or else multiple of the largest, that is not below `number`."""
    return SIZES[bisect_left(SIZES, number)] if number <= SIZES[-1] else -(-number // SIZES[-1]) * SIZES[-1]


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
