"""Rotary position embedding in plain PyTorch, with the operations and roundings of transformers' functions."""

from __future__ import annotations

import torch


def rotary_naive(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, in_float: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.rotary`."""
    cos, sin = cos[:, None], sin[:, None]
    if layout == "pairs of halves":
        cos, sin = (one[..., : one.shape[-1] // 2].repeat_interleave(2, dim=-1) for one in (cos, sin))

    def rotated(states: torch.Tensor) -> torch.Tensor:
        part, rest = states.tensor_split([cos.shape[-1]], dim=-1)
        if in_float:
            part = part.float()
        if layout == "halves":
            first, second = part.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        else:
            turned = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        return torch.cat(((part * cos + turned * sin).to(states.dtype), rest), dim=-1)

    return rotated(query), rotated(key)
