"""
Passes of one program over one row of a vocabulary, in blocks; up to STAGES - 1 further blocks are being loaded into
shared memory. Other threads may read the results that a pass writes to memory only after a barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_filters import sort_keys


@triton.jit
def argmax(scores, vocab, BLOCK: tl.constexpr):
    """The index of the largest score, the lowest index among equals."""
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
def load_scores(scores, columns, at, vocab, COLUMNS: tl.constexpr):
    """Scores of the target's tokens, float32; -inf beyond the vocabulary, and for tokens without a column."""
    column = at
    known = at < vocab
    if COLUMNS:
        column = tl.load(columns + at, mask=known, other=-1)
        known = column >= 0
    return tl.load(scores + column, mask=known, other=float("-inf")).to(tl.float32)


@triton.jit
def add_weights(scores, temperature, highest, total):
    """A step of the online softmax (arXiv 1805.02867); `total` `[BLOCK]` sums weights relative to `highest`."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=0))
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    total = total * tl.exp((highest - shift) / temperature) + tl.exp((scores - shift) / temperature)
    return new_highest, total


@triton.jit
def softmax_sums(
    scores, columns, vocab, temperature, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """The largest score, and the sum of all weights exp((score - largest) / temperature), in one pass."""
    in_block = tl.arange(0, BLOCK)
    highest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=1 if COLUMNS else STAGES):
        found = load_scores(scores, columns, first + in_block, vocab, COLUMNS)
        highest, total = add_weights(found, temperature, highest, total)
    return highest, tl.sum(total, axis=0)


@triton.jit
def kept_weights(
    scores, at, vocab, highest, temperature, threshold, first_tied, FILTERED: tl.constexpr, SHIFT: tl.constexpr
):
    """Weights exp((score - highest) / temperature), 0 beyond the vocabulary and for tokens that the filters remove."""
    kept = at < vocab
    if FILTERED:
        keys = sort_keys(scores, SHIFT)
        kept &= (keys > threshold) | ((keys == threshold) & (at >= first_tied))
    return tl.where(kept, tl.exp((scores - highest) / temperature), 0.0)


@triton.jit
def write_weights(
    logits, weights, vocab, highest, temperature, threshold, first_tied,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes `kept_weights` of all tokens. A barrier is needed before other threads read them."""
    in_block = tl.arange(0, BLOCK)
    for first in range(0, vocab, BLOCK):
        at = first + in_block
        found = load_scores(logits, logits, at, vocab, False)
        weight = kept_weights(found, at, vocab, highest, temperature, threshold, first_tied, FILTERED, SHIFT)
        tl.store(weights + at, weight, mask=at < vocab)


@triton.jit
def draw(
    logits, weights, vocab, highest, temperature, threshold, first_tied, total, uniform,
    WRITTEN: tl.constexpr, FILTERED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """
    The first index at which the running sum of the weights exceeds `uniform` times `total`. The weights are computed
    from the logits, or with WRITTEN read from `weights`.
    """
    in_block = tl.arange(0, BLOCK)
    goal = uniform.to(tl.float64) * total.to(tl.float64)
    before = goal * 0.0
    chosen = vocab
    last = vocab * 0  # the last index with a weight so far, taken if rounded sums never exceed the goal
    first = vocab * 0
    while (first < vocab) & (chosen >= vocab):
        at = first + in_block
        if WRITTEN:
            weight = tl.load(weights + at, mask=at < vocab, other=0.0)
        else:
            found = load_scores(logits, logits, at, vocab, False)
            weight = kept_weights(found, at, vocab, highest, temperature, threshold, first_tied, FILTERED, SHIFT)
        block_total = tl.sum(weight, axis=0).to(tl.float64)
        if block_total > 0.0:
            last = tl.max(tl.where(weight > 0.0, at, -1), axis=0)
        if before + block_total > goal:
            running = before + tl.cumsum(weight, axis=0).to(tl.float64)
            chosen = tl.min(tl.where((running > goal) & (weight > 0.0), at, vocab), axis=0)
            chosen = tl.where(chosen < vocab, chosen, last)
        before += block_total
        first += BLOCK
    return tl.where(chosen < vocab, chosen, last)


@triton.jit
def write_first_residual(
    logits, draft, columns, residual, scores, vocab, struck,
    highest, total, temperature, threshold, first_tied, q_highest, q_total, q_temperature,
    FILTERED: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """
    Writes the residual max(p - q, 0), and log q (up to a constant) with token `struck` at -inf, both from logits. A
    barrier is needed before other threads read them.

    Returns:
        The sum of the residual; the largest remaining score, and the sum of exp(score - largest).
    """
    in_block = tl.arange(0, BLOCK)
    left = tl.zeros([BLOCK], tl.float32)
    new_highest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), axis=0)
    new_total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=1 if COLUMNS else STAGES):
        at = first + in_block
        found = load_scores(logits, logits, at, vocab, False)
        p = kept_weights(found, at, vocab, highest, temperature, threshold, first_tied, FILTERED, SHIFT) / total
        score = load_scores(draft, columns, at, vocab, COLUMNS)
        weight = tl.maximum(p - tl.exp((score - q_highest) / q_temperature) / q_total, 0.0)
        tl.store(residual + at, weight, mask=at < vocab)
        left += weight
        score = tl.where(at == struck, float("-inf"), score / q_temperature)
        tl.store(scores + at, score, mask=at < vocab)
        new_highest, new_total = add_weights(score, 1.0, new_highest, new_total)
    return tl.sum(left, axis=0), new_highest, tl.sum(new_total, axis=0)


@triton.jit
def write_residual(
    weights, residual, scores, vocab, struck, total, q_highest, q_total, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """
    Writes the residual max(p - q, 0) of p and log q that are in memory. The caller must set the score of token
    `struck` to -inf, after a barrier.

    Returns:
        The sum of the residual; the largest remaining score, and the sum of exp(score - largest).
    """
    in_block = tl.arange(0, BLOCK)
    left = tl.zeros([BLOCK], tl.float32)
    new_highest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), axis=0)
    new_total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = first + in_block
        p = tl.load(weights + at, mask=at < vocab, other=0.0) / total
        score = tl.load(scores + at, mask=at < vocab, other=float("-inf"))
        weight = tl.maximum(p - tl.exp(score - q_highest) / q_total, 0.0)
        tl.store(residual + at, weight, mask=at < vocab)
        left += weight
        new_highest, new_total = add_weights(tl.where(at == struck, float("-inf"), score), 1.0, new_highest, new_total)
    return tl.sum(left, axis=0), new_highest, tl.sum(new_total, axis=0)
