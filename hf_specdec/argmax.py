"""The index of the largest score."""

from __future__ import annotations

import torch


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """
    `scores.argmax(dim=-1)`, `[…, vocab]` to `[…]` int64: the first of equals. On the CPU numpy's is used, which takes
    3 µs for 49,152 float32 scores where torch's takes 30, and for bfloat16 170.
    """
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    return torch.from_numpy(scores.detach().numpy().argmax(axis=-1, keepdims=True)).squeeze(-1)
