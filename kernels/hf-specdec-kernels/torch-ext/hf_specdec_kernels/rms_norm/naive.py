"""RMSNorm in plain PyTorch, with the operations and roundings of transformers' modules."""

from __future__ import annotations

import torch


def rms_norm_naive(input: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str) -> torch.Tensor:
    """See `hf_specdec_kernels.rms_norm`."""
    states = input.float()
    states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
    if scaling == "rounded":
        return weight * states.to(input.dtype)
    factors = 1.0 + weight.float() if scaling == "offset" else weight.float()
    return (states * factors).to(input.dtype)
