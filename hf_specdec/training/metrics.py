"""Agreement of a draft with its target by depth, and the acceptance length that would follow in decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class DepthCounts:
    """
    Counts of an objective over a batch, by row of the batch and by depth of the draft tokens (depth 1 first).

    Args:
        correct (`torch.Tensor` of shape `[batch, depths]`, float32):
            Predicted tokens under the loss mask that equal the target's best token.
        rows (`torch.Tensor` of shape `[batch, depths]`, float32): Predicted tokens under the loss mask.
        loss (`torch.Tensor` of shape `[batch, depths]`, float32): Summed cross-entropy of the tokens in `loss_rows`.
        loss_rows (`torch.Tensor` of shape `[batch, depths]`, float32): Predicted tokens that have a loss.
    """

    correct: torch.Tensor
    rows: torch.Tensor
    loss: torch.Tensor
    loss_rows: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """The four counts as one tensor, `[batch, 4, depths]` float32, detached."""
        return torch.stack([self.correct, self.rows, self.loss, self.loss_rows], dim=1).detach().float()


def acceptance_length(top1: list[float]) -> float:
    """
    Simulated mean acceptance length of a greedy chain as deep as the list: 1 + Σ_d Π_{i ≤ d} top1_i.

    The acceptance of a depth is taken as independent of the other depths, and the text as the target's greedy one;
    real decoding differs a little in both.

    ```python
    >>> from hf_specdec.training.metrics import acceptance_length

    >>> acceptance_length([0.5, 0.5])
    1.75

    ```
    """
    total, survives = 1.0, 1.0
    for share in top1:
        survives *= share
        total += survives
    return total


def summarise(counts: torch.Tensor) -> dict[str, float]:
    """
    Metrics by name from summed counts.

    Args:
        counts (`torch.Tensor` of shape `[4, depths]`): `DepthCounts.stacked` summed over the batch dimension.

    Returns:
        `dict[str, float]`: `top1_d` and `loss_d` for every depth d, and `acceptance_length`.
    """
    correct, rows, loss, loss_rows = counts.double().tolist()
    top1 = [right / max(of, 1.0) for right, of in zip(correct, rows, strict=True)]
    result = {f"top1_{depth}": value for depth, value in enumerate(top1, 1)}
    for depth, (total, of) in enumerate(zip(loss, loss_rows, strict=True), 1):
        result[f"loss_{depth}"] = total / max(of, 1.0)
    result["acceptance_length"] = acceptance_length(top1)
    return {name: round(value, 5) for name, value in result.items()}
