"""Rotary position embedding: pairs of numbers of a query or key, turned by angles of its position."""

from __future__ import annotations

import torch

from .._ops import register, run
from ..checks import check, check_dtype
from .naive import rotary_naive


__all__ = ["LAYOUTS", "rotary", "rotary_naive", "unchecked"]

LAYOUTS = ("halves", "pairs", "pairs of halves")
"""Which numbers are turned together, and by which angles; see `rotary`."""
_HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "halves",
    in_float: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Turns the first `rotary_dim` numbers of queries and keys, and leaves those after them. Products and sums are
    rounded to the larger dtype of states and cosines, as by eager PyTorch.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, nodes, head_dim]`), key (`torch.Tensor` of shape `[batch,
            kv_heads, nodes, head_dim]`): bfloat16, float16 or float32, both of one dtype.
        cos, sin (`torch.Tensor` of shape `[1 or batch, nodes, rotary_dim]`): of the queries' dtype, or float32.
        layout (`str`, *optional*, defaults to `"halves"`): `"halves"`: number i and number i + rotary_dim / 2 are
            turned, as in Llama; `"pairs"`: numbers 2i and 2i + 1, as in Cohere; `"pairs of halves"`: the same by
            cosines i and sines i, as in GLM.
        in_float (`bool`, *optional*, defaults to `False`): whether states are converted to float32 first.

    Returns:
        `tuple`: queries and keys, in memory node by node.

    Raises:
        ValueError, TypeError: if an argument has another shape, dtype or device, or there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` is {layout!r}; pass one of {', '.join(map(repr, LAYOUTS))}.")
    doubles = (torch.float64,) if query.device.type == "cpu" else ()
    check_dtype("query", query, _HALF_OR_SINGLE + doubles)
    check("query", query, query.device, None, None, None, None, None)
    batch, _, nodes, head_dim = query.shape
    check("key", key, query.device, (query.dtype,), batch, None, nodes, head_dim)
    check("cos", cos, query.device, (query.dtype, torch.float32), (1, batch), nodes, None)
    check("sin", sin, query.device, (cos.dtype,), *cos.shape)
    if cos.shape[2] % 2 or cos.shape[2] > head_dim:
        raise ValueError(f"`cos` has {cos.shape[2]} numbers a node; it must be even and at most {head_dim}.")
    return unchecked(query, key, cos, sin, layout, in_float)


_operator = register(rotary_naive, ("out_query", "out_key"))


def unchecked(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, in_float: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary`, which does not check its arguments."""
    out = _room_for(query), _room_for(key)
    run(_operator, query, key, cos, sin, layout, in_float, *out)
    return out


def _room_for(states: torch.Tensor) -> torch.Tensor:
    batch, heads, nodes, size = states.shape
    return torch.empty(batch, nodes, heads, size, dtype=states.dtype, device=states.device).transpose(1, 2)
