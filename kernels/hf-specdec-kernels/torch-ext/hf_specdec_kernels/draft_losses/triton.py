"""Losses of a draft's predictions in Triton: a program reads one prediction's two rows of logits, twice."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compilation import launcher
from ..rejection_sampling.triton_passes import argmax, softmax_sums


LARGEST_BLOCK = 8192


@triton.jit
def _pair(draft_logits, logits, vocabulary, at, inside, VOCABULARY: tl.constexpr):
    """Logits of the draft and of the target for tokens of the draft vocabulary."""
    token = tl.load(vocabulary + at, mask=inside, other=0) if VOCABULARY else at
    score = tl.load(draft_logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    return score, tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _sign(value):
    return tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0))


@triton.jit
def _draft_loss_values_kernel(
    draft_logits, logits, rows, wanted, vocabulary, values, best,
    draft_vocab, vocab, draft_stride, logits_stride,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (prediction)."""
    row = tl.program_id(0).to(tl.int64)
    draft_logits += row * draft_stride
    logits += tl.load(rows + row) * logits_stride
    token = tl.load(wanted + row)
    q_highest, q_total = softmax_sums(draft_logits, draft_logits, draft_vocab, 1.0, False, BLOCK, 1)
    p_highest, p_total = softmax_sums(logits, logits, vocab, 1.0, False, BLOCK, 1)
    sum_q, sum_p = q_highest + tl.log(q_total), p_highest + tl.log(p_total)
    divergence = tl.zeros([BLOCK], tl.float32)
    distance = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    for first in range(0, draft_vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < draft_vocab
        score, found = _pair(draft_logits, logits, vocabulary, at, inside, VOCABULARY)
        q, p = tl.exp(score - sum_q), tl.exp(found - sum_p)
        divergence += p * tl.where(inside, sum_q - score, 0.0)
        distance += tl.abs(p - q)
        mass += p
        slope += _sign(q - p) * q
    inside_mass = tl.sum(mass, axis=0)
    apart = tl.sum(distance, axis=0)
    if VOCABULARY:
        apart += 1.0 - inside_mass
    of_token = sum_q - tl.load(draft_logits + tl.maximum(token, 0)).to(tl.float32)
    values += 7 * row
    tl.store(values, tl.where(token >= 0, of_token, 0.0))
    tl.store(values + 1, tl.sum(divergence, axis=0))
    tl.store(values + 2, apart)
    tl.store(values + 3, sum_q)
    tl.store(values + 4, sum_p)
    tl.store(values + 5, inside_mass)
    tl.store(values + 6, tl.sum(slope, axis=0))
    tl.store(best + row, argmax(draft_logits, draft_vocab, BLOCK).to(tl.int64))


@triton.jit
def _draft_loss_gradient_kernel(
    draft_logits, logits, rows, wanted, vocabulary, values, gradients, gradient,
    draft_vocab, draft_stride, logits_stride,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (prediction, block of the draft vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < draft_vocab
    logits += tl.load(rows + row) * logits_stride
    score, found = _pair(draft_logits + row * draft_stride, logits, vocabulary, at, inside, VOCABULARY)
    values += 7 * row
    gradients += 3 * row
    q, p = tl.exp(score - tl.load(values + 3)), tl.exp(found - tl.load(values + 4))
    token = tl.load(wanted + row)
    of_token = tl.where(token >= 0, tl.load(gradients), 0.0) * (q - tl.where(at == token, 1.0, 0.0))
    of_divergence = tl.load(gradients + 1) * (tl.load(values + 5) * q - p)
    of_distance = tl.load(gradients + 2) * q * (_sign(q - p) - tl.load(values + 6))
    total = (of_token + of_divergence + of_distance).to(gradient.dtype.element_ty)
    tl.store(gradient + row * draft_vocab + at, total, mask=inside)


def _block(size: int) -> int:
    return min(max(triton.next_power_of_2(size), 64), LARGEST_BLOCK)


def launch_draft_loss_values(draft_logits, logits, rows, wanted, vocabulary, values, best) -> None:
    """See `hf_specdec_kernels.draft_losses`; writes to `values` and `best`."""
    count, draft_vocab = draft_logits.shape
    if count == 0:
        return
    block = _block(draft_vocab)
    launcher(_draft_loss_values_kernel, (count,))(
        draft_logits, logits, rows.contiguous(), wanted.contiguous(),
        rows if vocabulary is None else vocabulary.contiguous(), values, best,
        draft_vocab, logits.shape[1], draft_logits.stride(0), logits.stride(0),
        VOCABULARY=vocabulary is not None, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip


def launch_draft_loss_gradient(
    draft_logits, logits, rows, wanted, vocabulary, values, gradients, gradient
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.draft_losses`; writes to `gradient`, `[n, draft vocab]`, contiguous."""
    count, draft_vocab = draft_logits.shape
    if count == 0:
        return
    block = min(_block(draft_vocab), 4096)
    launcher(_draft_loss_gradient_kernel, (count, triton.cdiv(draft_vocab, block)))(
        draft_logits, logits, rows.contiguous(), wanted.contiguous(),
        rows if vocabulary is None else vocabulary.contiguous(), values, gradients.contiguous(), gradient,
        draft_vocab, draft_logits.stride(0), logits.stride(0),
        VOCABULARY=vocabulary is not None, BLOCK=block, num_warps=min(8, max(4, block // 512)),
    )  # fmt: skip
