"""Overlaps of p and q in Triton: a program sums p and q of one row at one temperature, then what they share."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compilation import launcher
from ..rejection_sampling.triton_passes import softmax_sums


LARGEST_BLOCK = 16384


@triton.jit
def _sums(scores, vocab, temperature, BLOCK: tl.constexpr):
    """See `softmax_sums`; the total is NaN where there is no softmax."""
    highest, total = softmax_sums(scores, scores, vocab, temperature, False, BLOCK, 1)
    is_finite = (highest > float("-inf")) & (highest < float("inf"))
    return highest, tl.where(is_finite, total, float("nan"))


@triton.jit
def _draft_overlaps_kernel(
    logits, draft_logits, grid, temperature, draft_temperature, vocabulary, overlaps,
    vocab, draft_vocab, logits_stride, draft_stride,
    TEMPERED: tl.constexpr, DRAFT_TEMPERED: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (temperature, row)."""
    row = tl.program_id(1)
    logits += row.to(tl.int64) * logits_stride
    draft_logits += row.to(tl.int64) * draft_stride
    heat = tl.load(temperature + row) if TEMPERED else 1.0
    draft_heat = tl.load(grid + tl.program_id(0))
    if DRAFT_TEMPERED:
        draft_heat *= tl.load(draft_temperature + row)
    p_highest, p_total = _sums(logits, vocab, heat, BLOCK)
    q_highest, q_total = _sums(draft_logits, draft_vocab, draft_heat, BLOCK)
    shared = tl.zeros([BLOCK], tl.float32)
    for first in range(0, draft_vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < draft_vocab
        token = tl.load(vocabulary + at, mask=inside, other=0) if VOCABULARY else at
        p = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        q = tl.load(draft_logits + at, mask=inside, other=float("-inf")).to(tl.float32)
        shared += tl.minimum(tl.exp((p - p_highest) / heat) / p_total, tl.exp((q - q_highest) / draft_heat) / q_total)
    # NaN of either spoils the sum, whatever the minimum of a number and NaN is.
    total = tl.sum(shared, axis=0) + 0.0 * (p_total + q_total)
    tl.store(overlaps + row * tl.num_programs(0) + tl.program_id(0), total)


def launch_draft_overlaps(
    logits, draft_logits, grid, temperature, draft_temperature, vocabulary, overlaps
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.draft_overlaps`; writes to `overlaps`."""
    batch, vocab = logits.shape
    if batch == 0:
        return
    block = min(max(triton.next_power_of_2(vocab), 64), LARGEST_BLOCK)
    launcher(_draft_overlaps_kernel, (len(grid), batch))(
        logits, draft_logits, grid.contiguous(),
        *(grid if one is None else one.contiguous() for one in (temperature, draft_temperature, vocabulary)),
        overlaps, vocab, draft_logits.shape[1], logits.stride(0), draft_logits.stride(0),
        TEMPERED=temperature is not None, DRAFT_TEMPERED=draft_temperature is not None,
        VOCABULARY=vocabulary is not None, BLOCK=block, num_warps=min(32, max(4, block // 512)),
    )  # fmt: skip
