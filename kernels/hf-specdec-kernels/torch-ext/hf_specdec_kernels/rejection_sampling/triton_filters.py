"""
Top-k and top-p without sorting: a program finds the threshold of one row of logits by a radix search, each round of
which counts scores in ranges of keys. The search uses weights in whole multiples of 2⁻⁴³, so that the order in which
they are added does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl


WEIGHT_OF_ONE = tl.constexpr(2.0**43)  # 2¹⁹ tokens of weight 1 fit into int64


@triton.jit
def sort_keys(scores, SHIFT: tl.constexpr):
    """
    int32 keys in the order of float32 scores. SHIFT drops low bits that are equal in all scores: 16 bits for scores
    that were bfloat16, 13 for float16.
    """
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def filters(
    logits, bins, vocab, highest, total, temperature, top_k, top_p,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """
    The tokens that top-k and then top-p keep: tokens with a key above a threshold, and tokens with the threshold's key
    from some index on.

    Args:
        highest, total: the largest score, and the sum of all weights exp((score - highest) / temperature).
        bins: memory for BINS int64.

    Returns:
        The threshold, int32; the index, int32; and the sum of the kept weights, float32.
    """
    threshold = sort_keys(tl.full([], float("-inf"), tl.float32), SHIFT)
    first_tied = vocab * 0
    filtered_by_k = (top_k > 0) & (top_k < vocab)
    if filtered_by_k:
        low = _rank_bound(logits, vocab, highest, top_k, SHIFT, BLOCK, STAGES)
        goal = top_k.to(tl.float64)
        threshold, _, _, _, _ = _search(
            logits, bins, vocab, highest, temperature, low, goal, 1.0, False, SHIFT, BLOCK, BINS, STAGES
        )
    if top_p < 1.0:
        low = threshold
        share = top_p.to(tl.float64)
        goal = share * total.to(tl.float64) * WEIGHT_OF_ONE
        if filtered_by_k:
            goal = -goal  # `total` is over all tokens: the search computes the total of the tokens that top-k keeps
        else:
            # All tokens of lower scores together weigh less than the share that top-p removes.
            least = highest + temperature * tl.log((1.0 - top_p) * total / (1.01 * vocab))
            low = tl.maximum(low, sort_keys(least, SHIFT))
        threshold, above, tied, each, goal = _search(
            logits, bins, vocab, highest, temperature, low, goal, share, True, SHIFT, BLOCK, BINS, STAGES
        )
        # Number of the equal scores at the threshold that are needed to reach the goal.
        needed = tl.ceil((goal - above.to(tl.float64)) / tl.maximum(each, 1).to(tl.float64)).to(tl.int64)
        needed = tl.minimum(tl.maximum(needed, 1), tied)
        if needed < tied:
            first_tied = _first_tied(logits, vocab, threshold, (tied - needed).to(tl.int32), SHIFT, BLOCK)
        total = ((above + needed * each).to(tl.float64) / WEIGHT_OF_ONE).to(tl.float32)
    elif filtered_by_k:
        total = _weight_from(logits, vocab, highest, temperature, threshold, SHIFT, BLOCK, STAGES)
    return threshold, first_tied, total


@triton.jit
def _fixed_weight(scores, highest, temperature):
    return (tl.exp((scores - highest) / temperature) * WEIGHT_OF_ONE).to(tl.int64)


@triton.jit
def _score_of(key, SHIFT: tl.constexpr):
    """The float32 score of a key; the inverse of `sort_keys`."""
    bits = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _rank_bound(logits, vocab, highest, rank, SHIFT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """
    A key that at least `rank` scores reach, and few more: the key of that rank among BLOCK maxima, each over every
    BLOCK-th score, which stay in registers.
    """
    in_block = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = first + in_block
        best = tl.maximum(best, tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32))
    keys = sort_keys(best, SHIFT)
    low = sort_keys(tl.full([], float("-inf"), tl.float32), SHIFT).to(tl.int64)
    high = sort_keys(highest, SHIFT).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= rank:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _search(
    logits, bins, vocab, highest, temperature, low, goal, share,
    WEIGHED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """
    The largest key, or else `low`, at or above which the scores number (with WEIGHED: weigh) at least `goal`. A
    negative `goal` stands for `share` times the number (or weight) of the scores from `low` on.

    Returns:
        The key, int32; the number (or weight) of the scores above it, int64; the number of scores at the key and the
        weight of each, int64; and the goal, float64.
    """
    places = tl.arange(0, BINS)
    best = sort_keys(highest, SHIFT).to(tl.int64)
    span = tl.maximum(best - low, 0)  # the last key of the range is best - span
    above = span * 0
    number = span * 0
    each = span * 0 + 1
    searching = vocab * 0 + 1
    while searching > 0:
        width = vocab * 0  # binary logarithm of the keys of a bin
        while (span >> width) >= BINS:
            width += 1
        first, last = best.to(tl.int32), (best - span).to(tl.int32)
        if WEIGHED & (width > 0):
            _count(logits, bins, vocab, highest, temperature, first, last, width, True, SHIFT, BLOCK, BINS, STAGES)
        else:
            _count(logits, bins, vocab, highest, temperature, first, last, width, False, SHIFT, BLOCK, BINS, STAGES)
        counted = tl.load(bins + places, cache_modifier=".cg")
        weights = tl.full([BINS], 1, tl.int64)
        if WEIGHED & (width == 0):  # a bin has one key
            weights = _fixed_weight(_score_of(first - places, SHIFT), highest, temperature)
        reached = above + tl.cumsum(counted * weights, axis=0)
        if goal < 0.0:
            goal = share * tl.max(reached, axis=0).to(tl.float64)
        found = tl.min(tl.where(reached.to(tl.float64) >= goal, places, BINS), axis=0).to(tl.int64)
        found = tl.minimum(found, span >> width)
        number = tl.sum(tl.where(places == found, counted, 0), axis=0)
        each = tl.sum(tl.where(places == found, weights, 0), axis=0)
        above = tl.sum(tl.where(places == found, reached, 0), axis=0) - number * each
        best -= found << width
        span = tl.minimum(span - (found << width), (span * 0 + 1 << width) - 1)
        searching = (width > 0).to(tl.int32)
    return best.to(tl.int32), above, number, each, goal


@triton.jit
def _count(
    logits, bins, vocab, highest, temperature, best, last, width,
    WEIGHED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fills BINS bins of 2^width keys each, from `best` down to `last`, with the number or weight of the scores."""
    tl.debug_barrier()  # all threads have read the counts of the previous round
    tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
    tl.debug_barrier()
    # A thread loads eight neighbours at once, and adds them one by one: transposed, they stay in their thread.
    in_block = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = first + in_block
        found = tl.load(logits + at, mask=at < vocab, other=float("nan"))  # the key of NaN is above all others
        found = tl.reshape(tl.trans(found), [BLOCK]).to(tl.float32)
        keys = sort_keys(found, SHIFT)
        inside = (keys <= best) & (keys >= last)
        place = (best - keys).to(tl.uint32, bitcast=True) >> width.to(tl.uint32)
        weight = tl.full([BLOCK], 1, tl.int64)
        if WEIGHED:
            weight = _fixed_weight(tl.where(inside, found, highest), highest, temperature)
        tl.atomic_add(bins + place.to(tl.int32), weight, mask=inside, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _first_tied(logits, vocab, threshold, dropped, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The index of the first token at the threshold that is kept, after the `dropped` ones of lower indices."""
    in_block = tl.arange(0, BLOCK)
    first = vocab * 0
    first_tied = vocab * 0
    seen = dropped * 0
    while (first < vocab) & (seen <= dropped):
        at = first + in_block
        found = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        is_tied = ((sort_keys(found, SHIFT) == threshold) & (at < vocab)).to(tl.int32)
        tied = tl.sum(is_tied, axis=0)
        if seen + tied > dropped:
            order = seen + tl.cumsum(is_tied, axis=0)
            first_tied = tl.min(tl.where(order > dropped, at, vocab), axis=0)
        seen += tied
        first += BLOCK
    return first_tied


@triton.jit
def _weight_from(
    logits, vocab, highest, temperature, threshold, SHIFT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """The sum of the weights of the scores whose key is at least `threshold`, float32."""
    in_block = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = first + in_block
        found = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        kept = (at < vocab) & (sort_keys(found, SHIFT) >= threshold)
        total += tl.where(kept, tl.exp((found - highest) / temperature), 0.0)
    return tl.sum(total, axis=0)
