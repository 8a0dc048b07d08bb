"""What trials of a module's own forward need: a copy with other parts, and whether it computes what ours does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels import DEVICES


def has_tensors(modules: list[nn.Module], *known: str) -> bool:
    """Whether modules have tensors besides the known ones: what these do to our numbers may change in place."""
    return any(
        tensor is not None and name not in known
        for module in modules
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )


def double(module: nn.Module, **others: dict[str, Any]) -> nn.Module:
    """A copy of a module with other parameters or parts."""
    copy = nn.Module.__new__(type(module))
    copy.__dict__.update(vars(module) | others)
    return copy


def are_equal(own: Any, ours: torch.Tensor) -> bool:
    """Whether a module's own output is ours, bit for bit."""
    return isinstance(own, torch.Tensor) and own.dtype == ours.dtype and torch.equal(own, ours)


def may_run(dtype: torch.dtype, *tensors: Any) -> bool:
    """Whether the kernels take these tensors, all of this dtype and of no other class (sharded, quantized)."""
    device = tensors[0].device
    return dtype in DEVICES.get(device.type, ()) and all(
        type(one) in (torch.Tensor, nn.Parameter) and one.dtype == dtype and one.device == device for one in tensors
    )
