"""Numbers over which a module's own arithmetic is compared with ours."""

from __future__ import annotations

from functools import lru_cache

import torch


def some_numbers(shape: tuple[int, ...], step: float = 1.0) -> torch.Tensor:
    """Numbers between -1.5 and 1.5 without a pattern, in float32, on the CPU."""
    return _in_a_row(torch.Size(shape).numel(), step).view(shape).clone()


@lru_cache(maxsize=32)
def _in_a_row(count: int, step: float) -> torch.Tensor:
    """The numbers, which the layers of a model ask for again and again."""
    places = torch.arange(1, 1 + count, dtype=torch.float64, device="cpu")
    return (1.5 * torch.sin(step * places * places)).float()
