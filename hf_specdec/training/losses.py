"""The soft cross-entropy that all objectives share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ..eagle.unroll import upcast


_ROWS_AT_ONCE = 4096


def soft_cross_entropy(
    states: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor], target_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Soft cross-entropy of every row, −Σ_x p(x) log q(x), with p the softmax of the target's logits.

    Logits are a hundred times wider than states, so they are computed for a few texts at a time, and recomputed in the
    backward pass.

    Args:
        states (`torch.Tensor` of shape `[batch, rows, H]`): inputs of the lm_head.
        to_logits (callable): the lm_head, or another function from states to logits `[…, vocab]`.
        target_logits (`torch.Tensor` of shape `[batch, rows, vocab]`): the target's logits for the draft vocabulary.

    Returns:
        Two `torch.Tensor` of shape `[batch, rows]`: the cross-entropy (float32, or float64 for float64 logits), and
        the index of the draft's best token, int64.
    """
    texts = max(1, _ROWS_AT_ONCE // max(states.shape[1], 1))
    losses, predictions = [], []
    for part, target_part in zip(states.split(texts), target_logits.split(texts), strict=True):
        if torch.is_grad_enabled():
            loss, predicted = checkpoint(_part, part, to_logits, target_part, use_reentrant=False)
        else:
            loss, predicted = _part(part, to_logits, target_part)
        losses.append(loss)
        predictions.append(predicted)
    return torch.cat(losses), torch.cat(predictions)


def _part(
    states: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor], target_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = upcast(to_logits(states))
    p = upcast(target_logits).softmax(dim=-1).to(logits.dtype)
    loss = -(p * logits.log_softmax(dim=-1)).sum(dim=-1)
    return loss, logits.detach().argmax(dim=-1)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, least: float = 1) -> torch.Tensor:
    """
    The mean of `values` where `mask` is true, 0 if it is true nowhere; no host synchronisation. A mask of weights has
    a sum of at least `least` where there is any.
    """
    return (values * mask).sum() / mask.sum().clamp(min=least)
