"""
Widths of prompt chunks: a few, so that a prefill can be replayed from captured CUDA graphs. For a small
model, the host takes longer to launch a forward than the device to run it, even over some hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


WIDTHS = (64, 256, 512)
"""Widths of chunks, in tokens per row."""
LONGEST_FORWARD = 512
"""Most tokens per row that a draft reads in one forward while it catches up: bounds its memory."""
TOKENS_TIMES_PARAMETERS = 5 * 10**12
"""Tokens times parameters of a forward that takes a current GPU 25 ms, at two operations for each and 400 TFLOP/s."""
MOST_PADDED = 512
"""Most tokens of short prompts, over all rows and with padding, in one padded chunk: it computes the logits of all."""


FEWEST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 2048, 8192
"""Bounds of the default number of prompt tokens per step on a GPU; see `chunk_size_for`."""


def chunk_size_for(num_parameters: int) -> int:
    """
    Prompt tokens that a current GPU forwards in about 50 ms with a model of this size, within bounds: a forward of a
    small model takes as long as its kernel launches, however few the tokens.
    """
    return min(max(2 * busy_at(num_parameters), FEWEST_CHUNK_TOKENS), MOST_CHUNK_TOKENS)


def busy_at(num_parameters: int) -> int:
    """Tokens from which on a forward of a model of this size takes the device longer than the host to launch it."""
    return TOKENS_TIMES_PARAMETERS // max(num_parameters, 1)


def next_chunk(length: int, unread: int, widths: Sequence[int]) -> tuple[int | None, int]:
    """
    The width of a text's next chunk, and how many of its tokens are unread. A last chunk may begin with tokens that
    were forwarded before, if these are less than a quarter of it or there is no smaller width. A text shorter than any
    width gives None and `unread`.

    Args:
        length (`int`): tokens of the text.
        unread (`int`): tokens at the end of the text that have not been forwarded.
        widths (`Sequence[int]`): widths of chunks, ascending.
    """
    for width in widths:
        if unread <= width <= length and (width == widths[0] or 4 * unread > 3 * width):
            return width, unread
    fitting = [width for width in widths if width <= unread]
    return (fitting[-1], fitting[-1]) if fitting else (None, unread)


def padded_chunk(unread: int, widths: Sequence[int]) -> tuple[int, int]:
    """
    The width of a text's next chunk where padding may follow, and how many unread tokens it holds: all, in the first
    width that they fill by more than half (or the narrowest, however few); else as many as fill the largest width that
    they can fill.
    """
    for width in widths:
        if unread <= width and (width == widths[0] or 2 * unread > width):
            return width, unread
    largest = max(width for width in widths if width <= unread)
    return largest, largest
