"""RMSNorm with a gate in plain PyTorch, with the operations and roundings of transformers' modules."""

from __future__ import annotations

import torch


def gated_rms_norm_naive(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int,
    scaling: str,
    activation: str,
    gate_first: bool,
) -> torch.Tensor:
    """See `hf_specdec_kernels.gated_rms_norm`."""
    states, gates = input.float(), gate.float()
    gates = torch.nn.functional.silu(gates) if activation == "silu" else gates.sigmoid()
    if gate_first:
        states = states * gates
    of_groups = states.unflatten(-1, (groups, -1))
    of_groups = of_groups * torch.rsqrt(of_groups.pow(2).mean(-1, keepdim=True) + eps)
    states = of_groups.flatten(-2)
    states = weight * (states.to(input.dtype) if scaling == "rounded" else states)
    if not gate_first:
        states = states * gates
    return states.to(input.dtype)
