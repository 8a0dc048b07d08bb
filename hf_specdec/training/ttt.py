"""EAGLE-3's objective: the unrolled "training-time test" (arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..eagle import EagleHead
from ..eagle.unroll import unroll
from ..whole_texts import check_trainable
from .losses import masked_mean, soft_cross_entropy
from .metrics import counts_by_depth
from .reading import TargetOutputs


class TttObjective(nn.Module):
    """
    EAGLE-3's loss: Σ_k decay^k · soft cross-entropy of step k against the target's softmax over the draft vocabulary.

    A row has a loss if the token it predicts is under the loss mask and the target's best token is in the draft
    vocabulary.

    Args:
        head (`EagleHead`): a head of version 3. Without an lm_head of its own it is trained with the target's.
        num_steps (`int`, *optional*, defaults to 7): K, unrolled steps.
        decay (`float`, *optional*, defaults to 0.8): weight of a step relative to the previous one.
        recompute (`bool`, *optional*, defaults to `False`): saves memory at the cost of time, see `unroll`.

    Raises:
        ValueError: for a head of another version, or one that `check_trainable` refuses.
    """

    def __init__(self, head: EagleHead, num_steps: int = 7, decay: float = 0.8, recompute: bool = False):
        super().__init__()
        if head.config.eagle_version != 3:
            raise ValueError(
                f"`head` is of EAGLE version {head.config.eagle_version}; this objective trains EAGLE-3 heads. Use "
                "`Eagle1Objective` for version 1."
            )
        check_trainable(head)
        self.model = head
        self.num_steps, self.decay, self.recompute = num_steps, decay, recompute

    def forward(
        self,
        outputs: TargetOutputs,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """
        Loss and counts of a batch.

        Args:
            outputs (`TargetOutputs`): the target's outputs for the batch.
            input_ids, position_ids, segment_ids (`torch.Tensor` of shape `[batch, tokens]`, int64): see `Collator`.
            loss_mask (`torch.Tensor` of shape `[batch, tokens]`, bool): tokens to be predicted.

        Returns:
            `dict`: `loss`, a scalar, and `counts`, `[batch, 4, K]` float32, see `counts_by_depth`.
        """
        steps = unroll(
            self.model,
            outputs.features,
            outputs.embeddings,
            self.num_steps,
            position_ids=position_ids,
            segment_ids=segment_ids,
            recompute=self.recompute,
        )
        total: Any = 0.0
        counts = []
        for step, states in enumerate(steps):
            loss, right, mask, has_loss = self._step(step, states, outputs, loss_mask, segment_ids)
            total = total + self.decay**step * masked_mean(loss, has_loss)
            counts.append((right, mask, loss * has_loss, has_loss))
        return {"loss": total, "counts": counts_by_depth(counts)}

    def _step(
        self,
        step: int,
        states: torch.Tensor,
        outputs: TargetOutputs,
        loss_mask: torch.Tensor,
        segment_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """
        Loss, correctness, loss mask and rows with a loss of one unrolled step, each `[batch, rows]`.

        Row t of step k predicts token t + 2 + k, which row t + 1 + k of the target predicts too.
        """
        rows = max(loss_mask.shape[1] - 2 - step, 0)
        mask = predicted_mask(loss_mask, segment_ids, step)
        best = outputs.best[:, 1 + step : 1 + step + rows]
        target_logits = outputs.logits[:, 1 + step : 1 + step + rows]
        lm_head = outputs.lm_head if self.model.lm_head is None else self.model.lm_head
        loss, predicted = soft_cross_entropy(states[:, :rows], lm_head, target_logits)
        return loss, (predicted == best) & mask, mask, mask & (best >= 0)


def predicted_mask(loss_mask: torch.Tensor, segment_ids: torch.Tensor | None, step: int) -> torch.Tensor:
    """
    Mask of the rows that count at an unrolled step, `[batch, tokens − 2 − step]` bool.

    Row t counts if the token that it predicts, t + 2 + `step`, is under the loss mask and belongs to the row's text.
    """
    mask = loss_mask[:, 2 + step :]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, 2 + step :] == segment_ids[:, : mask.shape[1]])
    return mask
