"""Lists of the best tokens in Triton: a program scores all candidates of a position after some of those before."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compilation import launcher
from ..triton_ranking import key_of, nothing, pack, place_of
from . import BYTES_OF_KEY


BLOCK_BEFORE = 16
"""Candidates of the position before that a program has: the fewest that a product of matrices takes."""


@triton.jit(do_not_specialize=["candidates", "ranks"])
def _pair_lists_kernel(
    tokens, log_q, queries, keys, named, scored, following, candidates, ranks, size, keys_stride,
    COUNTS_OTHERS: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Program (level of a row, block of the candidates before)."""
    level = tl.program_id(0).to(tl.int64)
    before = tl.program_id(1) * BEFORE + tl.arange(0, BEFORE)
    place = tl.arange(0, BLOCK)
    is_before, inside = before < candidates, place < candidates
    names = tl.load(tokens + level * candidates + place, mask=inside, other=0)
    own = tl.load(log_q + level * candidates + place, mask=inside, other=float("-inf"))
    queries += (level * candidates + before[:, None]) * size
    gained = tl.zeros([BEFORE, BLOCK], tl.float32)
    for first in range(0, size, RANK):
        number = first + tl.arange(0, RANK)
        of_query = is_before[:, None] & (number < size)[None, :]
        of_key = inside[None, :] & (number < size)[:, None]
        query = tl.load(queries + number[None, :], mask=of_query, other=0.0)
        key = tl.load(keys + names[None, :] * keys_stride + number[:, None], mask=of_key, other=0.0)
        gained = tl.dot(query, key, gained, input_precision="ieee")
    scores = own[None, :] + gained
    is_nan = scores != scores
    ranked = tl.where(is_nan, float("-inf"), scores)
    top = tl.max(ranked, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    # NaN stays in the sum, and so in the log-probabilities.
    sums = tl.sum(tl.where(inside[None, :], tl.exp(scores - shift[:, None]), 0.0), axis=1)
    if COUNTS_OTHERS:
        others = 1.0 - tl.sum(tl.where(inside, tl.exp(own), 0.0), axis=0)
        sums += tl.where(others > 0.0, others, 0.0) * tl.exp(-shift)
    total = shift + tl.log(sums)
    packed = tl.where(inside[None, :], pack(ranked, place[None, :]), nothing())
    out = (level * candidates + before) * ranks
    for rank in range(ranks):
        winner = tl.max(packed, axis=1)
        of_winner = place_of(winner)
        name = tl.load(tokens + level * candidates + of_winner, mask=is_before, other=0)
        tl.store(named + out + rank, name, mask=is_before)
        tl.store(scored + out + rank, key_of(winner) - total, mask=is_before)
        tl.store(following + out + rank, of_winner.to(tl.int64), mask=is_before)
        packed = tl.where(packed == winner[:, None], nothing(), packed)


def launch_pair_lists(tokens, log_q, queries, keys, ranks, counts_others, named, scored, following) -> None:
    """See `hf_specdec_kernels.pair_lists`; writes to contiguous results."""
    batch, levels, candidates = tokens.shape
    if not tokens.numel():
        return
    size = queries.shape[3]
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    launcher(_pair_lists_kernel, (batch * levels, triton.cdiv(candidates, BLOCK_BEFORE)))(
        tokens.contiguous(), log_q.contiguous(), queries.contiguous(), keys, named, scored, following,
        candidates, ranks, size, keys.stride(0),
        COUNTS_OTHERS=counts_others, BLOCK=max(16, triton.next_power_of_2(candidates)), BEFORE=BLOCK_BEFORE,
        RANK=min(BYTES_OF_KEY // keys.element_size(), max(16, triton.next_power_of_2(size))), num_warps=8,
    )  # fmt: skip
