"""Numbers over which a module's own arithmetic is compared with ours."""

from __future__ import annotations

import torch


def some_numbers(shape: tuple[int, ...], step: float = 1.0) -> torch.Tensor:
    """Numbers between -1.5 and 1.5 without a pattern, in float32, on the CPU."""
    places = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
    return (1.5 * torch.sin(step * places * places)).float().view(shape)
