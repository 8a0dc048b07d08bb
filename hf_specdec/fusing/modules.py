"""
Which modules can be fused, and how. A module's class only shows what it may be: its own forward is run once over a few
numbers, and must compute what the kernel's plain version does, bit for bit.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..kernels import DEVICES
from ..models.hooks import has_hooks_for_graphs
from ..models.modules import modules_of, parameters_of
from ..models.numbers import some_numbers
from .forward import Fused, FusedForward
from .rotary import functions_named_in, fused_rotary, has_rotary


_EPS = ("variance_epsilon", "eps")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", None, "down_proj"))
"""Names of an MLP's layers: gate, the other input (None: both in one layer), and output."""
NOT_FUSED = object()
"""Says that a module cannot be fused."""
_SMALL = 1e-3
"""Size of numbers beside which an eps shows."""
_LARGE = torch.tensor([[1.0], [12.0], [120.0]], device="cpu")
"""Sizes of numbers that show whether a gate is clamped; their products are finite in float16."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of any module."""
_BY_VALUE = frozenset((bool, int, float, str))


@dataclass(frozen=True)
class _Found:
    """
    The modules of a model that can be fused.

    Args:
        key: what they depend on.
        forwards (`list`): a weak reference to each, since a model must not be kept alive, and its fused forward; None
            for attention layers, whose forwards depend on all names of their file.
        tried (`list`): the modules that were tried, and the parts of them that a fused forward passes by, as weak
            references, and the state of each.
        named (`dict`): the functions that the forwards of tried modules name.
    """

    key: Any
    forwards: list[tuple[weakref.ref[nn.Module], Fused | None]]
    tried: list[tuple[weakref.ref[nn.Module], Any]]
    named: dict[Any, Any]

    def holds(self, key: Any) -> bool:
        """Whether all this is still so."""
        if self.key != key or any(functions_named_in(forward) != named for forward, named in self.named.items()):
            return False
        return all(reference() is not None for reference, _ in self.forwards) and all(
            (module := reference()) is not None and _state_of(module) == state for reference, state in self.tried
        )


_found: weakref.WeakKeyDictionary[nn.Module, _Found] = weakref.WeakKeyDictionary()


def fused_forwards(model: nn.Module) -> list[tuple[nn.Module, Fused]]:
    """
    The modules of a model that can be fused, each with its fused forward; none if there are hooks, which may be on
    parts that a fused forward passes by. They are looked for anew if a part has changed, or a value that it holds.
    """
    modules = modules_of(model)
    if has_hooks_for_graphs(modules):
        return []
    kinds: tuple[Any, ...] = tuple(map(type, modules))
    dtype = next((one.dtype for one in parameters_of(modules) if one.dtype.is_floating_point), torch.float32)
    key = tuple(map(id, modules)), kinds, tuple(kind.forward for kind in dict.fromkeys(kinds)), dtype
    found = _found.get(model)
    if found is None or not found.holds(key):
        tried = [part for module in modules for part in _read_by(module)]
        states = [(weakref.ref(one), _state_of(one)) for one in tried]
        named = {forward: functions_named_in(forward) for forward in {type(one).forward for one in tried}}
        forwards = [(weakref.ref(one), fused) for one in modules if (fused := _fused(one, dtype)) is not NOT_FUSED]
        found = _found[model] = _Found(key, forwards, states, named)
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


def _state_of(module: nn.Module) -> list[Any]:
    """What a module's forward reads besides its parts and tensors: numbers by value, anything else by its identity."""
    return [
        (name, value if type(value) in _BY_VALUE else id(value))
        for name, value in vars(module).items()
        if name not in _OF_TORCH and type(value) is not FusedForward
    ]


def _read_by(module: nn.Module) -> list[nn.Module]:
    """A module that may be fused, and the parts of it that its fused forward passes by; else nothing."""
    if _is_like_norm(module):
        return [module]
    names = _names_of_gated(module)
    return [] if names is None else [module, *_passed_by(module, names)]


def _is_like_norm(module: nn.Module) -> bool:
    return not module._modules and list(module._parameters) == ["weight"]


def _names_of_gated(module: nn.Module) -> tuple[str, str | None, str] | None:
    """Names of an MLP's layers, see `_GATED`; None for other modules."""
    return next((names for names in _GATED if all(name is None or name in module._modules for name in names)), None)


def _passed_by(module: nn.Module, names: tuple[str, str | None, str]) -> list[nn.Module]:
    """The parts of an MLP that are none of its three layers, and all modules in them."""
    others = [part for name, part in module._modules.items() if name not in names and part is not None]
    return [one for part in others for one in modules_of(part)]


def _fused(module: nn.Module, dtype: torch.dtype) -> Any:
    """The fused forward of a module of a model of this dtype (see `_Found`); `NOT_FUSED` if its own must run."""
    kind: Any = type(module)
    if has_rotary(kind.forward):
        return None
    if not _is_own(kind, kind.forward):
        return NOT_FUSED
    try:
        if _is_like_norm(module):
            return _fused_norm(module, dtype) or NOT_FUSED
        names = _names_of_gated(module)
        return (None if names is None else _fused_gate(module, names, dtype)) or NOT_FUSED
    except Exception:  # noqa: BLE001  (code of others, to which our numbers may be anything)
        return NOT_FUSED


@lru_cache(maxsize=4096)
def _is_own(kind: type, forward: Any) -> bool:
    """Whether a class of a model file has the forward that is written there, and nobody has replaced or wrapped it."""
    of_class = next((one for one in kind.__mro__ if "forward" in vars(one)), kind)
    if not isinstance(forward, FunctionType) or of_class.__module__.partition(".")[0] == "torch":
        return False
    return forward.__globals__.get("__name__") == of_class.__module__ and not hasattr(forward, "__wrapped__")


def _has_tensors(modules: list[nn.Module], *known: str) -> bool:
    """Whether modules have tensors besides the known ones: what these do to our numbers may change in place."""
    return any(
        tensor is not None and name not in known
        for module in modules
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )


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
    scaling = None if _has_tensors([module], "weight") else _scaling_of(module, weight, name)
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
    weight = module.weight
    if len(args) == 1 and not options and _may_run(dtype, args[0], weight) and args[0].shape[-1:] == weight.shape:
        from hf_specdec_kernels.rms_norm import unchecked

        return unchecked(args[0], weight, getattr(module, eps), scaling)
    return type(module).forward(module, *args, **options)


# ---------------------------------------------------------------------------------------------------------- gated MLPs


def _fused_gate(module: nn.Module, names: tuple[str, str | None, str], dtype: torch.dtype) -> Fused | None:
    activation = _activation_of(module, names, dtype)
    return None if activation is None else partial(_run_gate, activation, names, dtype)


class _Gives(nn.Module):
    """A layer with a given output, which refuses any input but the one given."""

    def __init__(self, output: torch.Tensor, input: torch.Tensor):
        super().__init__()
        self.output, self.input = output, input

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input is not self.input and not torch.equal(input, self.input):
            raise ValueError("The MLP changes its input before it hands it to its layers.")
        return self.output


def _activation_of(module: nn.Module, names: tuple[str, str | None, str], dtype: torch.dtype) -> str | None:
    """The activation of a gated MLP, see `hf_specdec_kernels.gated_product`; None if it computes something else."""
    from hf_specdec_kernels.gated_product import ACTIVATIONS, gated_product_naive

    passed_by = [module, *_passed_by(module, names)]
    if _has_tensors(passed_by):
        return None
    input, numbers = some_numbers((3, 8)).to(dtype), (_LARGE * some_numbers((3, 256))).to(dtype)
    gates, ups = numbers.chunk(2, dim=-1)
    layers = [numbers] if names[1] is None else [gates, ups]
    own = _own_product(_double(module, _modules=module._modules | {names[2]: nn.Identity()}), names, layers, input)
    for activation in ACTIVATIONS:
        if _are_equal(own, gated_product_naive(gates, ups, activation)):
            return activation
    return None


def _own_product(
    module: nn.Module, names: tuple[str, str | None, str], outputs: list[torch.Tensor], input: torch.Tensor
) -> Any:
    """An MLP's own forward, where its layers before the product have these outputs."""
    layers = {name: _Gives(output, input) for name, output in zip(filter(None, names[:2]), outputs, strict=True)}
    return type(module).forward(_double(module, _modules=module._modules | layers), input)


def _run_gate(
    activation: str, names: tuple[str, str | None, str], dtype: torch.dtype, module: Any, *args: Any, **options: Any
) -> Any:
    if len(args) != 1 or options:
        return type(module).forward(module, *args, **options)
    outputs = [module._modules[name](args[0]) for name in filter(None, names[:2])]
    gates, ups = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    if not _may_run(dtype, gates, ups) or gates.shape != ups.shape:
        return _own_product(module, names, outputs, args[0])
    from hf_specdec_kernels.gated_product import unchecked

    return module._modules[names[2]](unchecked(gates, ups, activation))


def _are_equal(own: Any, ours: torch.Tensor) -> bool:
    return isinstance(own, torch.Tensor) and own.dtype == ours.dtype and torch.equal(own, ours)
