"""
Passes of one program over one row of a vocabulary, in blocks. What a pass writes to memory is read by other threads
only behind a barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_filters import sort_keys


@triton.jit
def argmax(scores, vocab, BLOCK: tl.constexpr):
    """The index of the largest score, the first of equals."""
    in_block = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = in_block
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        found = tl.load(scores + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        better = found > best
        best = tl.where(better, found, best)
        best_at = tl.where(better, at, best_at)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_at, 2**30), axis=0)


@triton.jit
def maximum(scores, vocab, BLOCK: tl.constexpr):
    """The largest score."""
    in_block = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        best = tl.maximum(best, tl.load(scores + at, mask=at < vocab, other=float("-inf")).to(tl.float32))
    return tl.max(best, axis=0)


@triton.jit
def write_weights(
    logits, weights, vocab, highest, temperature, threshold, first_tied,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """
    Writes exp((logit - highest) / temperature), 0 for what the filters leave out. A barrier is needed before others
    read it.

    Returns:
        The sum.
    """
    in_block = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        found = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((found - highest) / temperature)
        if FILTERED:
            keys = sort_keys(found, SHIFT)
            kept = (keys > threshold) | ((keys == threshold) & (at >= first_tied))
            weight = tl.where(kept, weight, 0.0)
        tl.store(weights + at, weight, mask=at < vocab)
        total += tl.where(at < vocab, weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def draw(weights, vocab, total, uniform, BLOCK: tl.constexpr):
    """The first index at which the running sum of the weights exceeds `uniform` times the total."""
    in_block = tl.arange(0, BLOCK)
    goal = uniform.to(tl.float64) * total.to(tl.float64)
    before = goal * 0.0
    chosen = vocab
    first = vocab * 0
    while (first < vocab) & (chosen >= vocab):
        at = first + in_block
        weight = tl.load(weights + at, mask=at < vocab, other=0.0)
        block_total = tl.sum(weight, axis=0).to(tl.float64)
        if before + block_total > goal:
            running = before + tl.cumsum(weight, axis=0).to(tl.float64)
            chosen = tl.min(tl.where((running > goal) & (weight > 0.0), at, vocab), axis=0)
            if chosen >= vocab:  # the two sums of the block were rounded differently
                chosen = tl.max(tl.where(weight > 0.0, at, -1), axis=0)
        before += block_total
        first += BLOCK
    if chosen >= vocab:  # likewise, at the very end
        last = tl.full([BLOCK], -1, tl.int32)
        for first_of_block in range(0, vocab, BLOCK):
            at = first_of_block + in_block
            weight = tl.load(weights + at, mask=at < vocab, other=0.0)
            last = tl.where(weight > 0.0, at, last)
        chosen = tl.max(last, axis=0)
    return chosen


@triton.jit
def write_draft_scores(draft, scores, columns, vocab, temperature, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """log q up to a constant over the target's tokens, float32. A barrier is needed before others read it."""
    in_block = tl.arange(0, BLOCK)
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        inside = at < vocab
        column = at
        known = inside
        if COLUMNS:
            column = tl.load(columns + at, mask=inside, other=-1)
            known = column >= 0
        found = tl.load(draft + column, mask=known, other=float("-inf")).to(tl.float32)
        tl.store(scores + at, found / temperature, mask=inside)


@triton.jit
def sum_exp(scores, vocab, highest, BLOCK: tl.constexpr):
    """The sum of exp(score - highest)."""
    in_block = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        total += tl.exp(tl.load(scores + at, mask=at < vocab, other=float("-inf")) - highest)
    return tl.sum(total, axis=0)


@triton.jit
def write_residual(weights, residual, scores, vocab, total, q_highest, q_total, BLOCK: tl.constexpr):
    """max(p - q, 0), and its sum. A barrier is needed before others read it."""
    in_block = tl.arange(0, BLOCK)
    left = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        inside = at < vocab
        p = tl.load(weights + at, mask=inside, other=0.0) / total
        q = tl.exp(tl.load(scores + at, mask=inside, other=float("-inf")) - q_highest) / q_total
        weight = tl.maximum(p - q, 0.0)
        tl.store(residual + at, weight, mask=inside)
        left += weight
    return tl.sum(left, axis=0)
