"""What the predictions of a draft cost beside the target's, with gradients, for training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._ops import ops, register
from ..checks import INTEGERS, check, check_shape
from .naive import draft_loss_gradient_naive, draft_loss_values_naive


__all__ = ["DraftLosses", "draft_losses"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_NUM_VALUES, _NUM_LOSSES = 7, 3


class DraftLosses(NamedTuple):
    """Losses of each prediction, with q the draft's distribution and p the target's, `[n]` each."""

    cross_entropy: torch.Tensor
    """−log q of the wanted token, float32; 0 where there is none."""
    divergence: torch.Tensor
    """−Σ p log q over the draft vocabulary, float32: the divergence of q from p, but for p's own entropy."""
    distance: torch.Tensor
    """‖p − q‖₁, float32, with the tokens outside the draft vocabulary."""
    best: torch.Tensor
    """Index of the draft's best token in its vocabulary, int64, without a gradient."""


def draft_losses(
    draft_logits: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    vocabulary: torch.Tensor | None = None,
) -> DraftLosses:
    """
    Losses of a draft's predictions, differentiable by the draft's logits.

    On CUDA these are one launch, and one in the backward pass: no distribution is written to memory, where plain
    PyTorch writes and keeps some ten of them.

    Args:
        draft_logits (`torch.Tensor` of shape `[n, draft vocab]`): the draft's logits, float32, float16 or bfloat16.
            The last stride is 1.
        logits (`torch.Tensor` of shape `[m, vocab]`): the target's logits, as `draft_logits`; they get no gradient.
        rows (`torch.Tensor` of shape `[n]`, int64): the row of `logits` that predicts the same token.
        wanted (`torch.Tensor` of shape `[n]`, int64): the text's token, by its index in the draft vocabulary; negative
            for none.
        vocabulary (`torch.Tensor` of shape `[draft vocab]`, int32 or int64, *optional*): for a smaller draft
            vocabulary, the target's token of every column.

    Returns:
        `DraftLosses`: the losses of each prediction.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("draft_logits", draft_logits, None, None)
    count, device = draft_logits.shape[0], draft_logits.device
    check("draft_logits", draft_logits, device, FLOATS, None, None)
    check("logits", logits, device, FLOATS, None, None if vocabulary is not None else draft_logits.shape[1])
    for name, tensor in (("draft_logits", draft_logits), ("logits", logits)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"`{name}` has strides {tensor.stride()}; the last must be 1: pass `{name}.contiguous()`."
            )
    check("rows", rows, device, (torch.int64,), count)
    check("wanted", wanted, device, (torch.int64,), count)
    check("vocabulary", vocabulary, device, INTEGERS, draft_logits.shape[1])
    losses, best = _Losses.apply(draft_logits, logits.detach(), rows, wanted, vocabulary)
    cross_entropy, divergence, distance = losses.unbind(-1)
    return DraftLosses(cross_entropy, divergence, distance, best)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, draft_logits, logits, rows, wanted, vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
        values = draft_logits.new_empty(len(rows), _NUM_VALUES, dtype=torch.float32)
        best = rows.new_empty(len(rows))
        ops.draft_loss_values(draft_logits, logits, rows, wanted, vocabulary, values, best)
        ctx.save_for_backward(draft_logits, logits, rows, wanted, vocabulary, values)
        ctx.mark_non_differentiable(best)
        return values[:, :_NUM_LOSSES].clone(), best

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor, _: Any) -> tuple[Any, ...]:
        draft_logits, *others = ctx.saved_tensors
        gradient = draft_logits.new_empty(draft_logits.shape)
        ops.draft_loss_gradient(draft_logits, *others, gradients.float(), gradient)
        return gradient, None, None, None, None


register(draft_loss_values_naive, results=("values", "best"))
register(draft_loss_gradient_naive, results=("gradient",))
