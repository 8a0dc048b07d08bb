"""
Draft tokens in Triton: one kernel finds the best tokens of every part of the vocabulary in parallel, a second one the
best of these candidates. A part is held in registers, from which its best token is removed `count` times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


LARGEST_BLOCK = 16384


@triton.jit(do_not_specialize=["count", "queries"])
def _best_of_part_kernel(
    logits, temperature, noise, candidate_keys, candidate_tokens, highest, totals,
    vocab, count, queries, logits_stride_b, logits_stride_q, noise_stride_b, noise_stride_q,
    TEMPERED: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (query of a row, part): writes `count` candidates, and the part's share of the softmax's normaliser."""
    query = tl.program_id(0)
    part = tl.program_id(1)
    row = (query // queries).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    logits += row * logits_stride_b + (query % queries).to(tl.int64) * logits_stride_q
    scores = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if TEMPERED:
        scores = scores / tl.load(temperature + row)
    place = query * tl.num_programs(1) + part
    best = tl.max(scores, axis=0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    tl.store(highest + place, best)
    tl.store(totals + place, tl.sum(tl.exp(scores - shift), axis=0))
    keys = scores
    if NOISE:
        noise += row * noise_stride_b + (query % queries).to(tl.int64) * noise_stride_q
        keys = scores - tl.log(tl.load(noise + at, mask=inside, other=1.0))
    for rank in range(count):
        key = tl.max(keys, axis=0)
        token = tl.min(tl.where(keys == key, at, 2**30), axis=0)
        tl.store(candidate_keys + place * count + rank, key)
        tl.store(candidate_tokens + place * count + rank, token)
        keys = tl.where(at == token, float("-inf"), keys)


@triton.jit(do_not_specialize=["count", "queries"])
def _best_of_parts_kernel(
    logits, temperature, candidate_keys, candidate_tokens, highest, totals, tokens, log_probabilities,
    parts, count, queries, logits_stride_b, logits_stride_q,
    TEMPERED: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (query of a row): writes the best of the parts' candidates, and their log-probabilities."""
    query = tl.program_id(0)
    row = (query // queries).to(tl.int64)
    logits += row * logits_stride_b + (query % queries).to(tl.int64) * logits_stride_q
    part = tl.arange(0, BLOCK_PARTS)
    part_highest = tl.load(highest + query * parts + part, mask=part < parts, other=float("-inf"))
    part_totals = tl.load(totals + query * parts + part, mask=part < parts, other=0.0)
    shift = tl.max(part_highest, axis=0)
    total = tl.sum(part_totals * tl.exp(tl.where(part_totals > 0.0, part_highest - shift, float("-inf"))), axis=0)
    normaliser = shift + tl.log(total)
    at = tl.arange(0, BLOCK)
    inside = at < parts * count
    keys = tl.load(candidate_keys + query * parts * count + at, mask=inside, other=float("-inf"))
    held = tl.load(candidate_tokens + query * parts * count + at, mask=inside, other=2**30)
    for rank in range(count):
        key = tl.max(keys, axis=0)
        token = tl.min(tl.where(keys == key, held, 2**30), axis=0)
        possible = key > float("-inf")
        score = tl.load(logits + token, mask=possible, other=float("-inf")).to(tl.float32)
        if TEMPERED:
            score = score / tl.load(temperature + row)
        place = query.to(tl.int64) * count + rank
        tl.store(tokens + place, tl.where(possible, token, -1).to(tl.int64))
        tl.store(log_probabilities + place, tl.where(possible, score - normaliser, float("-inf")))
        keys = tl.where(held == token, float("-inf"), keys)


def launch_draft_tokens(logits, count, temperature, noise, tokens, log_probabilities) -> None:
    """See `hf_specdec_kernels.draft_tokens`; writes to the last two."""
    batch, queries, vocab = logits.shape
    if batch * queries == 0:
        return
    block = min(triton.next_power_of_2(max(vocab, 64)), LARGEST_BLOCK)
    parts = triton.cdiv(vocab, block)
    candidates = (batch * queries, parts, count)
    candidate_keys = logits.new_empty(candidates, dtype=torch.float32)
    candidate_tokens = logits.new_empty(candidates, dtype=torch.int32)
    highest, totals = logits.new_empty(2, *candidates[:2], dtype=torch.float32)
    heat = logits if temperature is None else temperature.contiguous()
    noise_strides = (0, 0) if noise is None else noise.stride()[:2]
    _best_of_part_kernel[(batch * queries, parts)](
        logits, heat, logits if noise is None else noise, candidate_keys, candidate_tokens, highest, totals,
        vocab, count, queries, *logits.stride()[:2], *noise_strides,
        TEMPERED=temperature is not None, NOISE=noise is not None, BLOCK=block,
        num_warps=min(32, max(4, block // 512)),
    )  # fmt: skip
    _best_of_parts_kernel[(batch * queries,)](
        logits, heat, candidate_keys, candidate_tokens, highest, totals, tokens, log_probabilities,
        parts, count, queries, *logits.stride()[:2],
        TEMPERED=temperature is not None, BLOCK_PARTS=triton.next_power_of_2(parts),
        BLOCK=triton.next_power_of_2(parts * count),
        num_warps=4 if parts * count <= 1024 else 8,
    )  # fmt: skip
