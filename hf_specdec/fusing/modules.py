"""
Which modules can be fused, and how. A module's class only shows what it may be: its own forward is run once over a few
numbers, and must compute what the kernel's plain version does, bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..kernels import DEVICES
from ..models.modules import modules_of, parameters_of
from ..models.numbers import some_numbers
from .rotary import fused_rotary, has_rotary


Fused = Callable[..., Any]
"""A forward with the module as its first argument."""

_EPS = ("variance_epsilon", "eps")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", None, "down_proj"))
"""Names of an MLP's layers: gate, the other input (None: both in one layer), and output."""
NOT_FUSED = object()
"""Says that a module cannot be fused."""
_SMALL = 1e-3
"""Size of numbers beside which an eps shows."""
_LARGE = 12.0
"""Size of numbers that show whether a gate is clamped."""


@dataclass(frozen=True)
class _Found:
    """
    The modules of a model that can be fused.

    Args:
        key: what they depend on.
        forwards (`list`): a weak reference to each, since a model must not be kept alive, and its fused forward; None
            for attention layers, whose forwards depend on all names of their file.
    """

    key: Any
    forwards: list[tuple[weakref.ref[nn.Module], Fused | None]]

    def holds(self, key: Any) -> bool:
        """Whether all this is still so."""
        return bool(self.key == key) and all(reference() is not None for reference, _ in self.forwards)


_found: weakref.WeakKeyDictionary[nn.Module, _Found] = weakref.WeakKeyDictionary()


def fused_forwards(model: nn.Module) -> list[tuple[nn.Module, Fused]]:
    """The modules of a model that can be fused, each with its fused forward. They are looked for if a part changes."""
    modules = modules_of(model)
    kinds: tuple[Any, ...] = tuple(map(type, modules))
    dtype = next((one.dtype for one in parameters_of(modules) if one.dtype.is_floating_point), torch.float32)
    key = tuple(map(id, modules)), kinds, tuple(kind.forward for kind in dict.fromkeys(kinds)), dtype
    found = _found.get(model)
    if found is None or not found.holds(key):
        forwards = [(weakref.ref(one), fused) for one in modules if (fused := _fused(one, dtype)) is not NOT_FUSED]
        found = _found[model] = _Found(key, forwards)
    rotary: dict[Any, Fused | None] = {}
    resolved = []
    for reference, fused in found.forwards:
        module: Any = reference()
        if fused is None:
            own = type(module).forward
            if own not in rotary:
                rotary[own] = fused_rotary(own)
            fused = rotary[own]
        if fused is not None:
            resolved.append((module, fused))
    return resolved


def _fused(module: nn.Module, dtype: torch.dtype) -> Any:
    """The fused forward of a module of a model of this dtype (see `_Found`); `NOT_FUSED` if its own must run."""
    kind: Any = type(module)
    forward, parts = kind.forward, module._modules
    if has_rotary(forward):
        return None
    if not _is_own(kind, forward):
        return NOT_FUSED
    try:
        if not parts and list(module._parameters) == ["weight"]:
            return _fused_norm(module, dtype) or NOT_FUSED
        for names in _GATED:
            if all(name is None or name in parts for name in names):
                return _fused_gate(module, names, dtype) or NOT_FUSED
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):  # code of others
        pass
    return NOT_FUSED


@lru_cache(maxsize=4096)
def _is_own(kind: type, forward: Any) -> bool:
    """Whether a class of a model file has the forward that is written there, and nobody has replaced or wrapped it."""
    of_class = next((one for one in kind.__mro__ if "forward" in vars(one)), kind)
    if not isinstance(forward, FunctionType) or of_class.__module__.partition(".")[0] == "torch":
        return False
    return forward.__globals__.get("__name__") == of_class.__module__ and not hasattr(forward, "__wrapped__")


def _double(module: nn.Module, **others: dict[str, Any]) -> nn.Module:
    """A copy of a module with other parameters or parts."""
    double = nn.Module.__new__(type(module))
    double.__dict__.update(vars(module) | others)
    return double


def _may_run(dtype: torch.dtype, *tensors: Any) -> bool:
    """Whether the kernels take these tensors, all of this dtype and of no other class (sharded, quantized)."""
    device = tensors[0].device
    return dtype in DEVICES.get(device.type, ()) and all(
        type(one) in (torch.Tensor, nn.Parameter) and one.dtype == dtype and one.device == device for one in tensors
    )


# ------------------------------------------------------------------------------------------------------------- RMSNorm


def _fused_norm(module: nn.Module, dtype: torch.dtype) -> Fused | None:
    name = next((one for one in _EPS if isinstance(getattr(module, one, None), float)), None)
    weight: Any = module._parameters["weight"]
    if name is None or weight is None or weight.dim() != 1 or weight.dtype != dtype:
        return None
    scaling = _scaling_of(module, weight, name)
    return None if scaling is None else partial(_run_norm, scaling, name, dtype)


def _scaling_of(module: nn.Module, weight: torch.Tensor, eps: str) -> str | None:
    """How a norm multiplies by its weight, see `hf_specdec_kernels.rms_norm`; None if it is none of these."""
    from hf_specdec_kernels.rms_norm import SCALINGS, rms_norm_naive

    size = len(weight)
    input, numbers = some_numbers((4, size)).to(weight.dtype), some_numbers((size,), 0.7).to(weight.dtype)
    input[2:] *= _SMALL
    own = type(module).forward(_double(module, _parameters={"weight": numbers}), input)
    for scaling in SCALINGS:
        if _are_equal(own, rms_norm_naive(input, numbers, getattr(module, eps), scaling)):
            return scaling
    return None


def _run_norm(scaling: str, eps: str, dtype: torch.dtype, module: Any, *args: Any, **options: Any) -> Any:
    if len(args) == 1 and not options and _may_run(dtype, args[0], module.weight):
        from hf_specdec_kernels.rms_norm import unchecked

        return unchecked(args[0], module.weight, getattr(module, eps), scaling)
    return type(module).forward(module, *args, **options)


# ---------------------------------------------------------------------------------------------------------- gated MLPs


def _fused_gate(module: nn.Module, names: tuple[str, str | None, str], dtype: torch.dtype) -> Fused | None:
    activation = _activation_of(module, names, dtype)
    return None if activation is None else partial(_run_gate, activation, names, dtype)


class _Gives(nn.Module):
    """A layer with a given output."""

    def __init__(self, output: torch.Tensor):
        super().__init__()
        self.output = output

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.output


def _activation_of(module: nn.Module, names: tuple[str, str | None, str], dtype: torch.dtype) -> str | None:
    """The activation of a gated MLP, see `hf_specdec_kernels.gated_product`; None if it computes something else."""
    from hf_specdec_kernels.gated_product import ACTIVATIONS, gated_product_naive

    numbers = (_LARGE * some_numbers((3, 256))).to(dtype)
    gates, ups = numbers.chunk(2, dim=-1)
    gate, up, down = names
    parts: dict[str, Any] = {gate: _Gives(numbers), down: nn.Identity()}
    if up is not None:
        parts |= {gate: _Gives(gates), up: _Gives(ups)}
    double = _double(module, _modules=module._modules | parts)
    own = type(module).forward(double, some_numbers((3, 8)).to(dtype))
    for activation in ACTIVATIONS:
        if _are_equal(own, gated_product_naive(gates, ups, activation)):
            return activation
    return None


def _run_gate(
    activation: str, names: tuple[str, str | None, str], dtype: torch.dtype, module: Any, *args: Any, **options: Any
) -> Any:
    from hf_specdec_kernels.gated_product import gated_product_naive, unchecked

    if len(args) != 1 or options:
        return type(module).forward(module, *args, **options)
    parts: Any = module._modules
    gate, up, down = map(parts.get, names)
    gates = gate(args[0])
    gates, ups = gates.chunk(2, dim=-1) if up is None else (gates, up(args[0]))
    fits = _may_run(dtype, gates, ups) and gates.shape == ups.shape
    return down(unchecked(gates, ups, activation) if fits else gated_product_naive(gates, ups, activation))


def _are_equal(own: Any, ours: torch.Tensor) -> bool:
    return isinstance(own, torch.Tensor) and own.dtype == ours.dtype and torch.equal(own, ours)
