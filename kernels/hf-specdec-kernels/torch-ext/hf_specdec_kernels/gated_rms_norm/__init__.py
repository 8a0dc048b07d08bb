"""RMSNorm of gated numbers, or gated after it, as in layers with Gated DeltaNet, KDA or Mamba-2."""

from __future__ import annotations

import torch

from .._ops import register, run
from ..checks import check, check_dtype
from .naive import gated_rms_norm_naive


__all__ = ["ACTIVATIONS", "SCALINGS", "gated_rms_norm", "gated_rms_norm_naive", "unchecked"]

ACTIVATIONS = ("silu", "sigmoid")
"""Activations of a gate."""
SCALINGS = ("rounded", "exact")
"""How a weight multiplies; see `gated_rms_norm`."""
_HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)


def gated_rms_norm(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int = 1,
    scaling: str = "rounded",
    activation: str = "silu",
    gate_first: bool = False,
) -> torch.Tensor:
    """
    `rms_norm(input) * weight * activation(gate)` over the last dimension; with `gate_first`,
    `rms_norm(input * activation(gate)) * weight`. Computed in float32.

    Args:
        input, gate (`torch.Tensor` of shape `[…, size]`): bfloat16, float16 or float32, both of one dtype.
        weight (`torch.Tensor` of shape `[size]`): of the input's dtype.
        eps (`float`): added to the mean of the squares.
        groups (`int`, *optional*, defaults to 1): equal parts of the last dimension that are normed by themselves.
        scaling (`str`, *optional*, defaults to `"rounded"`): `"rounded"`: numbers are rounded to the input's dtype
            before they are multiplied by the weight, as in Qwen3-Next and Mamba-2; `"exact"`: not, as in Falcon-H1.
        activation (`str`, *optional*, defaults to `"silu"`): `"silu"` or `"sigmoid"`.
        gate_first (`bool`, *optional*, defaults to `False`): whether the gate multiplies before the norm.

    Returns:
        `torch.Tensor`: like the input, contiguous.

    Raises:
        ValueError, TypeError: if an argument has another shape, dtype or device, or there is no such scaling or
            activation, or the size is no multiple of `groups`.
    """
    for name, value, known in (("scaling", scaling, SCALINGS), ("activation", activation, ACTIVATIONS)):
        if value not in known:
            raise ValueError(f"`{name}` is {value!r}; pass one of {', '.join(map(repr, known))}.")
    if input.dim() == 0:
        raise ValueError("`input` has no dimensions; it must be [..., size].")
    if groups < 1 or input.shape[-1] % groups:
        raise ValueError(f"`groups` is {groups}; pass a divisor of the input's last dimension, {input.shape[-1]}.")
    doubles = (torch.float64,) if input.device.type == "cpu" else ()
    check_dtype("input", input, _HALF_OR_SINGLE + doubles)
    check("gate", gate, input.device, (input.dtype,), *input.shape)
    check("weight", weight, input.device, (input.dtype,), input.shape[-1])
    return unchecked(input, gate, weight, eps, groups, scaling, activation, gate_first)


_operator = register(gated_rms_norm_naive, ("out",))


def unchecked(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int,
    scaling: str,
    activation: str,
    gate_first: bool,
) -> torch.Tensor:
    """`gated_rms_norm`, which does not check its arguments."""
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    run(_operator, input, gate, weight, eps, groups, scaling, activation, gate_first, out)
    return out
