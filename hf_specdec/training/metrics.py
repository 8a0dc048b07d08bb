"""Agreement of a draft with its target by depth, and the acceptance length that would follow in decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def counts_by_depth(steps: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
    """
    What an objective counts over a batch, `[batch, 4, depths]` float32, detached, with a depth for each step.

    Args:
        steps (`Iterable[Sequence[torch.Tensor]]`): of each step four tensors `[batch, rows]`: predicted tokens under
            the loss mask that equal the target's best token, predicted tokens under the loss mask, the cross-entropy
            of those that have a loss (else 0), and predicted tokens that have a loss.
    """
    columns = [torch.stack([values.sum(dim=1).detach().float() for values in step], dim=1) for step in steps]
    return torch.stack(columns, dim=2)


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
        counts (`torch.Tensor` of shape `[4, depths]`): `counts_by_depth` summed over the batch dimension.

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
