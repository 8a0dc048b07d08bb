"""RMSNorm: numbers over the root of the mean of their squares, times a weight."""

from __future__ import annotations

import torch

from .._ops import register, run
from ..checks import check, check_dtype
from .naive import rms_norm_naive


__all__ = ["SCALINGS", "rms_norm", "rms_norm_naive", "unchecked"]

SCALINGS = ("rounded", "exact", "offset")
"""How a weight multiplies; see `rms_norm`."""
_HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str = "rounded") -> torch.Tensor:
    """
    `input / sqrt(mean(input²) + eps)` over the last dimension, computed in float32, times the weight.

    Args:
        input (`torch.Tensor` of shape `[…, size]`): bfloat16, float16 or float32.
        weight (`torch.Tensor` of shape `[size]`): of the input's dtype.
        eps (`float`): added to the mean.
        scaling (`str`, *optional*, defaults to `"rounded"`): `"rounded"`: numbers are rounded to the input's dtype
            before they are multiplied, as in Llama; `"exact"`: after it, as in OLMo 2; `"offset"`: after they are
            multiplied by 1 + weight, as in Gemma.

    Returns:
        `torch.Tensor`: like the input, contiguous.

    Raises:
        ValueError, TypeError: if an argument has another shape, dtype or device, or there is no such scaling.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"`scaling` is {scaling!r}; pass one of {', '.join(map(repr, SCALINGS))}.")
    if input.dim() == 0:
        raise ValueError("`input` has no dimensions; it must be [..., size].")
    doubles = (torch.float64,) if input.device.type == "cpu" else ()
    check_dtype("input", input, _HALF_OR_SINGLE + doubles)
    check("weight", weight, input.device, (input.dtype,), input.shape[-1])
    return unchecked(input, weight, eps, scaling)


_operator = register(rms_norm_naive, ("out",))


def unchecked(input: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str) -> torch.Tensor:
    """`rms_norm`, which does not check its arguments."""
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    run(_operator, input, weight, eps, scaling, out)
    return out
