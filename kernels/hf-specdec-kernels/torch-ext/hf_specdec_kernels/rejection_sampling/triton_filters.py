"""Top-k and top-p without sorting, as passes of one program over one row of logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_keys(scores, SHIFT: tl.constexpr):
    """
    int32 keys in the order of float32 scores. SHIFT drops low bits that are all alike: 16 for scores that were
    bfloat16, 13 for float16.
    """
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _measure(
    logits, vocab, highest, temperature, floor, pivots,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """For each of PIVOTS keys the number (with MASS the weight) of scores at or above it and at or above `floor`."""
    in_block = tl.arange(0, BLOCK)
    measured = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        found = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        keys = sort_keys(found, SHIFT).to(tl.int64)
        weight = tl.exp((found - highest) / temperature) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.where((at < vocab) & (keys >= floor), weight, 0.0)
        measured += tl.where(keys[:, None] >= pivots[None, :], weight[:, None], 0.0)
    return tl.sum(measured, axis=0)


@triton.jit
def _largest_key(
    logits, vocab, highest, temperature, floor, goal,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The largest key at or above which the scores number (or weigh) at least `goal`: found without sorting."""
    low = floor
    high = sort_keys(highest, SHIFT).to(tl.int64) + 1
    while high - low > 1:
        pivots = low + (high - low) * (tl.arange(0, PIVOTS).to(tl.int64) + 1) // (PIVOTS + 1)
        reached = _measure(logits, vocab, highest, temperature, floor, pivots, MASS, SHIFT, BLOCK, PIVOTS) >= goal
        high = tl.minimum(high, tl.min(tl.where(reached | (pivots <= low), high, pivots), axis=0))
        low = tl.maximum(low, tl.max(tl.where(reached, pivots, low), axis=0))
    return low


@triton.jit
def filters(
    logits, vocab, highest, temperature, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """
    Which tokens top-k, and then top-p, leave: those with a key above a threshold, and those at it from some index on.

    Returns:
        The threshold, int64, and that index, int32.
    """
    threshold = tl.full([], -(2 ** (31 - SHIFT)), tl.int64)
    first_tied = vocab * 0
    if (top_k > 0) & (top_k < vocab):
        threshold = _largest_key(
            logits, vocab, highest, temperature, threshold, top_k.to(tl.float32), False, SHIFT, BLOCK, PIVOTS
        )
    if top_p < 1.0:
        at_floor = threshold + tl.zeros([PIVOTS], tl.int64)
        everything = _measure(logits, vocab, highest, temperature, threshold, at_floor, True, SHIFT, BLOCK, PIVOTS)
        goal = top_p * tl.max(everything, axis=0)
        floor = threshold
        threshold = _largest_key(logits, vocab, highest, temperature, floor, goal, True, SHIFT, BLOCK, PIVOTS)
        first_tied = _first_tied(logits, vocab, highest, temperature, threshold, goal, SHIFT, BLOCK, PIVOTS)
    return threshold, first_tied


@triton.jit
def _first_tied(
    logits, vocab, highest, temperature, threshold, goal,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Of the tokens at the threshold, the last ones that are needed to reach the goal stay: the index of the first."""
    pair = tl.arange(0, PIVOTS)
    pivots = threshold + (pair > 0).to(tl.int64)
    counts = _measure(logits, vocab, highest, temperature, threshold, pivots, False, SHIFT, BLOCK, PIVOTS)
    weights = _measure(logits, vocab, highest, temperature, threshold, pivots, True, SHIFT, BLOCK, PIVOTS)
    tied = tl.max(counts, axis=0) - tl.min(counts, axis=0)
    above = tl.min(weights, axis=0)
    each = (tl.max(weights, axis=0) - above) / tied
    needed = tl.minimum(tl.maximum(tl.ceil((goal - above) / each), 1.0), tied)
    dropped = (tied - needed).to(tl.int32)
    first_tied = vocab * 0
    if dropped > 0:
        in_block = tl.arange(0, BLOCK)
        seen = dropped * 0
        for first in range(0, vocab, BLOCK):
            at = first + in_block
            found = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            is_tied = (sort_keys(found, SHIFT) == threshold) & (at < vocab)
            order = seen + tl.cumsum(is_tied.to(tl.int32), axis=0)
            # One token has this place in the order.
            first_tied += tl.sum(tl.where(is_tied & (order == dropped + 1), at, 0), axis=0)
            seen += tl.sum(is_tied.to(tl.int32), axis=0)
    return first_tied
