"""
Draft tokens in Triton: one kernel finds the best tokens of every part of the vocabulary in parallel, a second one the
best of these candidates. A part is held in registers, from which its best token is removed `count` times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import num_multiprocessors
from ..triton_ranking import key_of, nothing, pack, place_of


SMALLEST_BLOCK, LARGEST_BLOCK = 1024, 8192
"""Tokens of a part."""
PROGRAMS = 4
"""Programs per multiprocessor that are wanted, as long as their parts are not too small."""
MOST_CANDIDATES = 8192
"""Candidates of all parts that one program should look through at most."""


@triton.jit
def _exponential_noise(seed, query, first, BLOCK: tl.constexpr):
    """See `exponential_noise`: the numbers of BLOCK tokens from `first` on, a multiple of 4."""
    group = first // 4 + tl.arange(0, BLOCK // 4)
    zero = group * 0
    a, b, c, d = tl.philox(seed, group, zero + query, zero, zero)
    return _exponential(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def _noise_of_tokens(seed, query, tokens):
    """The numbers of some tokens; see `noise.noise_of_tokens`."""
    zero = tokens * 0
    a, b, c, d = tl.philox(seed, tokens // 4, zero + query, zero, zero)
    word = tokens % 4
    return _exponential(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def _exponential(words):
    bits = words.to(tl.uint32, bitcast=True)
    uniforms = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = 1.0 - uniforms
    return tl.where(rest == 1.0, uniforms, -tl.log(rest) * (uniforms / tl.where(rest == 1.0, 1.0, 1.0 - rest)))


@triton.jit(do_not_specialize=["queries", "numbers_stride_b"])
def _noise_kernel(seeds, numbers, noise, vocab, queries, numbers_stride_b, numbers_stride_q, BLOCK: tl.constexpr):
    """Program (query of a row, part): writes the noise of BLOCK tokens."""
    query = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    row, place = query // queries, query % queries
    number = tl.load(numbers + row * numbers_stride_b + place * numbers_stride_q).to(tl.int32)
    found = _exponential_noise(tl.load(seeds + row), number, first, BLOCK)
    at = first + tl.arange(0, BLOCK)
    tl.store(noise + query.to(tl.int64) * vocab + at, found, mask=at < vocab)


@triton.jit
def _write_candidates(candidates, keys, at, count):
    packed = pack(keys, at)
    for rank in range(count):
        winner = tl.max(packed, axis=0)
        tl.store(candidates + rank, winner)
        packed = tl.where(packed == winner, nothing(), packed)


@triton.jit(do_not_specialize=["count", "queries", "first_query", "positions_stride_b"])
def _best_of_part_kernel(
    logits, temperature, seeds, positions, token_ids, best, drawn, highest, totals,
    vocab, count, queries, first_query, logits_stride_b, logits_stride_q, positions_stride_b, positions_stride_q,
    BEST: tl.constexpr, DRAWN: tl.constexpr, TEMPERED: tl.constexpr, POSITIONED: tl.constexpr, NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """
    Program (query of a row, part): writes `count` candidates for the `best` and the `drawn` tokens, the part's
    `highest` logit (+inf if it has NaN or +inf), and its share of the softmax's normaliser. Keys of candidates are
    relative to the part's highest score.
    """
    query = tl.program_id(0)
    part = tl.program_id(1)
    row = (query // queries).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    logits += row * logits_stride_b + (query % queries).to(tl.int64) * logits_stride_q
    scores = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    is_bad = (scores != scores) | (scores == float("inf"))
    has_bad = tl.max(is_bad.to(tl.int32), axis=0)
    scores = tl.where(is_bad, float("-inf"), scores)
    top = tl.max(scores, axis=0)
    scores = scores - tl.where(top == float("-inf"), 0.0, top)
    if TEMPERED:
        scores = scores / tl.load(temperature + row)
    place = query * tl.num_programs(1) + part
    tl.store(highest + place, tl.where(has_bad > 0, float("inf"), top))
    tl.store(totals + place, tl.sum(tl.exp(scores), axis=0))
    if BEST:
        _write_candidates(best + place.to(tl.int64) * count, scores, at, count)
    if DRAWN:
        number = first_query + query % queries
        if POSITIONED:
            number = tl.load(positions + row * positions_stride_b + query % queries * positions_stride_q).to(tl.int32)
        if NAMED:
            named = tl.load(token_ids + at, mask=at < vocab, other=0).to(tl.int32)
            noise = _noise_of_tokens(tl.load(seeds + row), number, named)
        else:
            noise = _exponential_noise(tl.load(seeds + row), number, part * BLOCK, BLOCK)
        _write_candidates(drawn + place.to(tl.int64) * count, scores - tl.log(noise), at, count)


@triton.jit
def _write_best(
    candidates, highest, logits, tokens, log_q, parts, count, shift, normaliser, heat,
    TOKENS: tl.constexpr, MISSING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """
    The best candidates of all parts: their `tokens`, with TOKENS, and their log-probabilities; MISSING and -inf where
    there is none.
    """
    at = tl.arange(0, BLOCK)
    packed = tl.load(candidates + at, mask=at < parts * count, other=nothing())
    top = tl.load(highest + at // count, mask=at < parts * count, other=float("-inf"))
    keys = key_of(packed) + (tl.where(top == float("-inf"), shift, top) - shift) / heat
    packed = tl.where(packed == nothing(), nothing(), pack(keys, place_of(packed)))
    for rank in range(count):
        winner = tl.max(packed, axis=0)
        token = place_of(winner)
        possible = (key_of(winner) > float("-inf")) & (normaliser < float("inf"))
        score = tl.load(logits + token, mask=possible, other=float("-inf")).to(tl.float32)
        tl.store(log_q + rank, tl.where(possible, (score - shift) / heat - normaliser, float("-inf")))
        if TOKENS:
            tl.store(tokens + rank, tl.where(possible, token, MISSING).to(tl.int64))
        packed = tl.where(packed == winner, nothing(), packed)


@triton.jit(do_not_specialize=["count", "queries"])
def _best_of_parts_kernel(
    logits, temperature, best, drawn, highest, totals, best_tokens, best_log_q, drawn_tokens, drawn_log_q,
    parts, count, queries, logits_stride_b, logits_stride_q,
    BEST: tl.constexpr, BEST_TOKENS: tl.constexpr, DRAWN: tl.constexpr, TEMPERED: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (query of a row): writes the best of the parts' candidates, and their log-probabilities."""
    query = tl.program_id(0)
    row = (query // queries).to(tl.int64)
    logits += row * logits_stride_b + (query % queries).to(tl.int64) * logits_stride_q
    heat = tl.load(temperature + row) if TEMPERED else 1.0
    part = tl.arange(0, BLOCK_PARTS)
    highest += query * parts
    tops = tl.load(highest + part, mask=part < parts, other=float("-inf"))
    part_totals = tl.load(totals + query * parts + part, mask=part < parts, other=0.0)
    top = tl.max(tops, axis=0)
    has_softmax = (top > float("-inf")) & (top < float("inf"))
    shift = tl.where(has_softmax, top, 0.0)
    weights = tl.where(tops > float("-inf"), tl.exp((tops - shift) / heat), 0.0)
    total = tl.sum(tl.where(has_softmax, part_totals * weights, 1.0), axis=0)
    normaliser = tl.where(has_softmax, tl.log(total), float("inf"))
    first = query.to(tl.int64) * count
    if BEST:
        _write_best(
            best + first * parts, highest, logits, best_tokens + first, best_log_q + first,
            parts, count, shift, normaliser, heat, BEST_TOKENS, -1, BLOCK,
        )  # fmt: skip
    if DRAWN:
        _write_best(
            drawn + first * parts, highest, logits, drawn_tokens + first, drawn_log_q + first,
            parts, count, shift, normaliser, heat, True, 0, BLOCK,
        )  # fmt: skip


def launch_draft_tokens(logits, count, temperature, tokens, log_probabilities) -> None:
    """See `hf_specdec_kernels.draft_tokens`; writes to the last two."""
    _launch(logits, count, temperature, best=(tokens, log_probabilities))


def launch_draw_children(
    logits, count, seeds, first_query, temperature, positions, token_ids, tokens, log_probabilities, best
) -> None:
    """See `hf_specdec_kernels.draw_children`; writes to the last three."""
    best_found, drawn_found = None if best is None else (None, best), (tokens, log_probabilities)
    _launch(logits, count, temperature, best_found, drawn_found, seeds, first_query, positions, token_ids)


def launch_exponential_noise(seeds, numbers, vocab, noise) -> None:
    """See `hf_specdec_kernels.exponential_noise`; writes to the last one, which is contiguous."""
    queries = numbers.shape[1]
    if noise.numel() == 0:
        return
    launcher(_noise_kernel, (numbers.numel(), triton.cdiv(vocab, SMALLEST_BLOCK)))(
        seeds.contiguous(), numbers, noise, vocab, queries, *numbers.stride(), BLOCK=SMALLEST_BLOCK
    )


def _launch(
    logits: torch.Tensor,
    count: int,
    temperature: torch.Tensor | None,
    best: tuple[torch.Tensor | None, torch.Tensor] | None = None,
    drawn: tuple[torch.Tensor, torch.Tensor] | None = None,
    seeds: torch.Tensor | None = None,
    first_query: int = 0,
    positions: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> None:
    batch, queries, vocab = logits.shape
    if batch * queries == 0:
        return
    block = _block_size(logits, count)
    parts = triton.cdiv(vocab, block)
    candidates = (batch * queries, parts, count)
    best_candidates = logits if best is None else logits.new_empty(candidates, dtype=torch.int64)
    drawn_candidates = logits if drawn is None else logits.new_empty(candidates, dtype=torch.int64)
    # Each of its own: code for addresses that are no multiples of 16 bytes is compiled apart.
    highest, totals = (logits.new_empty(candidates[:2], dtype=torch.float32) for _ in range(2))
    heat = logits if temperature is None else temperature.contiguous()
    flags = {"BEST": best is not None, "DRAWN": drawn is not None, "TEMPERED": temperature is not None}
    strides = (0, 0) if positions is None else positions.expand(batch, queries).stride()
    launcher(_best_of_part_kernel, (batch * queries, parts))(
        logits, heat, logits if seeds is None else seeds.contiguous(), logits if positions is None else positions,
        logits if token_ids is None else token_ids.contiguous(), best_candidates, drawn_candidates,
        highest, totals, vocab, count, queries, first_query, *logits.stride()[:2], *strides,
        **flags, POSITIONED=positions is not None, NAMED=token_ids is not None, BLOCK=block,
        num_warps=min(32, max(4, block // 512)),
    )  # fmt: skip
    launcher(_best_of_parts_kernel, (batch * queries,))(
        logits, heat, best_candidates, drawn_candidates, highest, totals,
        *(logits if one is None else one for one in (*(best or (None, None)), *(drawn or (None, None)))),
        parts, count, queries, *logits.stride()[:2],
        **flags, BEST_TOKENS=best is not None and best[0] is not None,
        BLOCK_PARTS=triton.next_power_of_2(parts), BLOCK=triton.next_power_of_2(parts * count),
        num_warps=4 if parts * count <= 1024 else 8,
    )  # fmt: skip


def _block_size(logits: torch.Tensor, count: int) -> int:
    """Tokens of a part: few where there are few queries, so that all multiprocessors have work."""
    batch, queries, vocab = logits.shape
    wanted = -(-batch * queries * vocab // (PROGRAMS * num_multiprocessors(logits.device)))
    block = max(SMALLEST_BLOCK, triton.next_power_of_2(wanted))
    while block < LARGEST_BLOCK and -(-vocab // block) * count > MOST_CANDIDATES:
        block *= 2
    return min(block, LARGEST_BLOCK)
