"""EAGLE-1's objective (arXiv 2401.15077, section 4.2): predict the target's next feature, and its next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..eagle import EagleHead
from ..eagle.unroll import unroll, upcast
from ..whole_texts import check_trainable
from .losses import masked_mean, soft_cross_entropy
from .metrics import counts_by_depth
from .reading import TargetOutputs
from .ttt import predicted_mask


class Eagle1Objective(nn.Module):
    """
    EAGLE-1's loss: SmoothL1(state, next feature) + 0.1 · soft cross-entropy through the target's frozen lm_head.

    In training, uniform noise in ±0.1 · 512 / T (T: tokens of the text) is added to the features that the head reads.

    Args:
        head (`EagleHead`): a head of version 1.
        num_steps (`int`, *optional*, defaults to 5): depths counted in evaluation; training unrolls one step.
        token_weight (`float`, *optional*, defaults to 0.1): weight of the cross-entropy.
        noise (`float`, *optional*, defaults to 0.1): size of the noise; 0 for none.

    Raises:
        ValueError: for a head of another version.
    """

    def __init__(self, head: EagleHead, num_steps: int = 5, token_weight: float = 0.1, noise: float = 0.1):
        super().__init__()
        if head.config.eagle_version != 1:
            raise ValueError(
                f"`head` is of EAGLE version {head.config.eagle_version}; this objective trains version 1. Use "
                "`TttObjective`."
            )
        check_trainable(head)
        self.model = head
        self.num_steps, self.token_weight, self.noise = num_steps, token_weight, noise

    def forward(
        self,
        outputs: TargetOutputs,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """See `TttObjective.forward`; `counts` are `[batch, 4, 1]` in training and `[batch, 4, K]` in evaluation."""
        features = outputs.features
        if self.training and self.noise:
            features = features + _noise(features, segment_ids, self.noise)
        steps = unroll(
            self.model,
            features,
            outputs.embeddings,
            1 if self.training else self.num_steps,
            position_ids=position_ids,
            segment_ids=segment_ids,
        )
        total: Any = 0.0
        counts = []
        for step, states in enumerate(steps):
            rows = max(loss_mask.shape[1] - 2 - step, 0)
            mask = predicted_mask(loss_mask, segment_ids, step)
            later = slice(1 + step, 1 + step + rows)
            loss, predicted = soft_cross_entropy(states[:, :rows], outputs.lm_head, outputs.logits[:, later])
            if step == 0:
                wanted = upcast(outputs.features[:, later])
                distance = F.smooth_l1_loss(upcast(states[:, :rows]), wanted, reduction="none").mean(dim=-1)
                total = masked_mean(distance, mask) + self.token_weight * masked_mean(loss, mask)
            right = (predicted == outputs.best[:, later]) & mask
            counts.append((right, mask, loss * mask, mask))
        return {"loss": total, "counts": counts_by_depth(counts)}


def _noise(features: torch.Tensor, segment_ids: torch.Tensor | None, size: float) -> torch.Tensor:
    """Uniform noise in ±size · 512 / T, `[batch, tokens, feature_size]`; T is the length of each token's text."""
    batch, tokens = features.shape[:2]
    if segment_ids is None:
        lengths = torch.full((batch, tokens), tokens, device=features.device)
    else:
        ones = torch.ones_like(segment_ids)
        lengths = torch.zeros_like(segment_ids).scatter_add(1, segment_ids, ones).gather(1, segment_ids)
    scale = (size * 512 / lengths).to(features.dtype)[..., None]
    return (torch.rand_like(features) * 2 - 1) * scale
