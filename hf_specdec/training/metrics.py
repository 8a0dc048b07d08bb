"""How well a draft agrees with its target, by depth, and what that would be worth in decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class DepthCounts:
    """
    What an objective counts in a batch, by text and by depth of the draft tokens (depth 1 first).

    Args:
        correct (`torch.Tensor` of shape `[batch, depths]`, float32):
            Rows whose best token is the target's best token.
        rows (`torch.Tensor` of shape `[batch, depths]`, float32): Rows under the loss mask.
        loss (`torch.Tensor` of shape `[batch, depths]`, float32): Summed cross-entropy of the rows in `loss_rows`.
        loss_rows (`torch.Tensor` of shape `[batch, depths]`, float32): Rows that have a loss.
    """

    correct: torch.Tensor
    rows: torch.Tensor
    loss: torch.Tensor
    loss_rows: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """All four, `[batch, 4, depths]`, detached."""
        return torch.stack([self.correct, self.rows, self.loss, self.loss_rows], dim=1).detach().float()


def acceptance_length(top1: list[float]) -> float:
    """
    Simulated mean acceptance length of a greedy chain as deep as the list: 1 + Σ_d Π_{i ≤ d} top1_i.

    Depths are taken as independent and the text as the target's greedy one. Real decoding differs a little in both.

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


def summarise(counts: torch.Tensor, prefix: str = "") -> dict[str, float]:
    """
    Args:
        counts (`torch.Tensor` of shape `[4, depths]`): sums of `DepthCounts.stacked` over texts.
        prefix (`str`, *optional*): put before every name.

    Returns:
        `dict[str, float]`: `top1_d` and `loss_d` for every depth d, and `acceptance_length`.
    """
    correct, rows, loss, loss_rows = counts.double().tolist()
    top1 = [right / max(of, 1.0) for right, of in zip(correct, rows, strict=True)]
    result = {f"{prefix}top1_{depth}": value for depth, value in enumerate(top1, 1)}
    for depth, (total, of) in enumerate(zip(loss, loss_rows, strict=True), 1):
        result[f"{prefix}loss_{depth}"] = total / max(of, 1.0)
    result[f"{prefix}acceptance_length"] = acceptance_length(top1)
    return {name: round(value, 5) for name, value in result.items()}
