"""The product of an activated gate and another vector, as in the MLPs of most models."""

from __future__ import annotations

import torch

from .._ops import register, run
from ..checks import check, check_dtype
from .naive import gated_product_naive


__all__ = ["ACTIVATIONS", "gated_product", "gated_product_naive", "unchecked"]

ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations of a gate; see `gated_product`."""
_HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """
    `activation(gate) * up`, with the activation computed in float32 and rounded before the product.

    Args:
        gate, up (`torch.Tensor` of shape `[…, size]`): bfloat16, float16 or float32, both of one dtype. They may be
            halves of one tensor.
        activation (`str`, *optional*, defaults to `"silu"`): `"silu"`, or `"gelu_tanh"`, GELU's tanh approximation.

    Returns:
        `torch.Tensor`: like the gate, contiguous.

    Raises:
        ValueError, TypeError: if an argument has another shape, dtype or device, or there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` is {activation!r}; pass one of {', '.join(map(repr, ACTIVATIONS))}.")
    if gate.dim() == 0:
        raise ValueError("`gate` has no dimensions; it must be [..., size].")
    doubles = (torch.float64,) if gate.device.type == "cpu" else ()
    check_dtype("gate", gate, _HALF_OR_SINGLE + doubles)
    check("up", up, gate.device, (gate.dtype,), *gate.shape)
    return unchecked(gate, up, activation)


_operator = register(gated_product_naive, ("out",))


def unchecked(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`gated_product`, which does not check its arguments."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    run(_operator, gate, up, activation, out)
    return out
