"""The best tokens of a draft's logits, by the Triton kernel where it can run."""

from __future__ import annotations

import torch

from ...kernels import DEVICES, DTYPES, kernels_are_installed


BestTokens = tuple[torch.Tensor, torch.Tensor]
"""Tokens `[…, count]` int64, the best first, and their log-probabilities, float32."""
_MOST_TOKENS = 64
"""Most tokens that the kernel finds."""


def best_tokens(logits: torch.Tensor, count: int, with_log_q: bool = True, in_order: bool = True) -> BestTokens:
    """
    The `count` best tokens for logits `[…, vocab]`, and their log-probabilities in float32, `[…, count]` each. Without
    `with_log_q`, other scores may take the place of log-probabilities, where they are cheaper; without `in_order`, the
    best need not be first.
    """
    if _suits_kernel(logits, count):
        return _best_tokens_by_kernel(logits, count)
    best = logits.topk(count, dim=-1, sorted=in_order)  # of the logits, which in half precision take half the passes
    if not with_log_q:
        return best.indices, best.values
    return best.indices, logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, best.indices)


def _suits_kernel(logits: torch.Tensor, count: int) -> bool:
    return (
        logits.device.type in DEVICES
        and logits.dtype in DTYPES
        and count <= min(_MOST_TOKENS, logits.shape[-1])
        and logits.stride(-1) == 1
        and kernels_are_installed()
    )


def _best_tokens_by_kernel(logits: torch.Tensor, count: int) -> BestTokens:
    """Finds the best tokens in one pass over the logits and without a softmax tensor."""
    from hf_specdec_kernels import draft_tokens

    rows = logits.reshape(1, -1, logits.shape[-1])
    tokens, log_q = (found.view(*logits.shape[:-1], count) for found in draft_tokens(rows, count))
    return tokens.clamp(min=0), log_q  # any token fills the places of missing ones
