"""
Walks over the tokens that filters have kept, where these are few: p and what is left of it stay in registers. Refusals
of children need a pass over q alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_filters import sort_keys
from .triton_passes import add_weights, load_scores


@triton.jit
def write_kept(
    logits, kept, vocab, threshold, first_tied, SHIFT: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the tokens that the filters keep, in order. Returns their number, or 0 if there are more than KEPT."""
    first = vocab * 0
    number = vocab * 0
    while (first < vocab) & (number <= KEPT):
        at = first + tl.arange(0, BLOCK)
        keys = sort_keys(tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32), SHIFT)
        is_kept = (keys > threshold) | ((keys == threshold) & (at >= first_tied))
        is_kept = (is_kept & (at < vocab)).to(tl.int32)
        of_block = tl.sum(is_kept, axis=0)
        if of_block > 0:
            place = number + tl.cumsum(is_kept, axis=0) - 1
            tl.store(kept + place, at, mask=(is_kept > 0) & (place < KEPT))
        number += of_block
        first += BLOCK
    return tl.where(number <= KEPT, number, 0)


@triton.jit
def load_kept(logits, kept, number, highest, temperature, KEPT: tl.constexpr):
    """The kept tokens and their weights exp((score - highest) / temperature), `[KEPT]`; 0 after the last."""
    inside = tl.arange(0, KEPT) < number
    at = tl.load(kept + tl.arange(0, KEPT), mask=inside, other=0)
    scores = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    return at, tl.where(inside, tl.exp((scores - highest) / temperature), 0.0)


@triton.jit
def draw_kept(at, weights, total, uniform, KEPT: tl.constexpr):
    """The first of the tokens `at` at which the running sum of the weights exceeds `uniform` times `total`."""
    slot = tl.arange(0, KEPT)
    exceeds = tl.cumsum(weights, axis=0).to(tl.float64) > uniform.to(tl.float64) * total.to(tl.float64)
    chosen = tl.min(tl.where(exceeds & (weights > 0.0), slot, KEPT), axis=0)
    last = tl.max(tl.where(weights > 0.0, slot, 0), axis=0)  # taken if rounded sums never exceed
    return tl.sum(tl.where(slot == tl.where(chosen < KEPT, chosen, last), at, 0), axis=0)


@triton.jit
def _strike(draft, scores, draft_vocab, column, refused, highest, temperature, BLOCK: tl.constexpr):
    """
    Strikes a column from q's `scores`, relative to the largest, which the first refusal writes.

    Returns:
        The largest remaining score, and the sum of exp(score - largest).
    """
    tl.debug_barrier()  # all threads have read the scores
    top = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, draft_vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < draft_vocab
        if refused == 0:
            score = tl.load(draft + at, mask=inside, other=float("-inf")).to(tl.float32)
            score = (score - highest) / temperature
        else:
            score = tl.load(scores + at, mask=inside, other=float("-inf"))
        score = tl.where(at == column, float("-inf"), score)
        tl.store(scores + at, score, mask=inside)
        top, total = add_weights(score, 1.0, top, total)
    tl.debug_barrier()
    return top, tl.sum(total, axis=0)


@triton.jit
def test_kept(
    at_node, draft, draft_columns, scores, kept, number, tokens, parents, uniforms, node, child, num_nodes,
    vocab, draft_vocab, highest, temperature, q_highest, q_total, q_temperature,
    COLUMNS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_NODES: tl.constexpr,
):  # fmt: skip
    """
    Tests the children of `node` from `child` on, as `rejection_walk_kernel` does.

    Returns:
        The accepted child, or `num_nodes`; and a token drawn from what the refusals have left of p.
    """
    at, p = load_kept(at_node, kept, number, highest, temperature, KEPT)
    total = tl.sum(p, axis=0)
    shift = tl.where(q_highest > float("-inf"), q_highest, 0.0)
    q_scores = (load_scores(draft, draft_columns, at, vocab, COLUMNS) - shift) / q_temperature
    q_top = q_highest - shift
    refused = node * 0
    found = node * 0
    while (child < num_nodes) & (found == 0):
        if q_top > float("-inf"):
            token = tl.load(tokens + child)
            column = token
            if COLUMNS:
                column = tl.load(draft_columns + token).to(tl.int64)
            is_own = (at == token) & (tl.arange(0, KEPT) < number)
            score = (tl.load(draft + column).to(tl.float32) - shift) / q_temperature
            if refused > 0:
                score = tl.load(scores + column)
            own = tl.sum(tl.where(is_own, p, 0.0), axis=0)
            q = (tl.exp(score - q_top) / q_total).to(tl.float64)
            if tl.load(uniforms + child).to(tl.float64) * q < (own / total).to(tl.float64):
                found += 1
            else:
                # Where the residual is empty, p and q differ by rounding only, and p is kept.
                residual = tl.maximum(p / total - tl.exp(q_scores - q_top) / q_total, 0.0)
                left = tl.sum(residual, axis=0)
                p = tl.where(left > 0.0, residual, p)
                total = tl.where(left > 0.0, left, total)
                q_scores = tl.where(is_own, float("-inf"), q_scores)
                q_top, q_total = _strike(draft, scores, draft_vocab, column, refused, shift, q_temperature, BLOCK)
                refused += 1
        if found == 0:
            child = next_child(tokens, parents, node, child, num_nodes, BLOCK_NODES)
    return child, draw_kept(at, p, total, tl.load(uniforms), KEPT)


@triton.jit
def next_child(tokens, parents, node, after, num_nodes, BLOCK_NODES: tl.constexpr):
    """The first child of `node` after node `after` that is not void, or `num_nodes`."""
    nodes = tl.arange(0, BLOCK_NODES)
    inside = (nodes > after) & (nodes < num_nodes)
    is_child = (tl.load(parents + nodes, mask=inside, other=-1) == node) & inside
    counts = tl.load(tokens + nodes, mask=inside, other=-1) >= 0
    return tl.min(tl.where(is_child & counts, nodes, num_nodes), axis=0)
