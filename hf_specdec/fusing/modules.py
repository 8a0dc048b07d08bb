"""
Which modules can be fused, and how. A module's class only shows what it may be: its own forward is run once over a few
numbers, and must compute what the kernel's plain version does, bit for bit.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..models.hooks import has_hooks_for_graphs
from ..models.modules import modules_of, parameters_of
from .forward import Fused, FusedForward
from .gates import fused_gate, names_of_gated, passed_by
from .norms import fused_norm, is_like_norm
from .rotary import functions_named_in, fused_rotary, has_rotary


NOT_FUSED = object()
"""Says that a module cannot be fused."""
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
    if is_like_norm(module):
        return [module]
    names = names_of_gated(module)
    return [] if names is None else [module, *passed_by(module, names)]


def _fused(module: nn.Module, dtype: torch.dtype) -> Any:
    """The fused forward of a module of a model of this dtype (see `_Found`); `NOT_FUSED` if its own must run."""
    kind: Any = type(module)
    if has_rotary(kind.forward):
        return None
    if not _is_own(kind, kind.forward):
        return NOT_FUSED
    try:
        if is_like_norm(module):
            return fused_norm(module, dtype) or NOT_FUSED
        names = names_of_gated(module)
        return (None if names is None else fused_gate(module, names, dtype)) or NOT_FUSED
    except Exception:  # noqa: BLE001  (code of others, to which our numbers may be anything)
        return NOT_FUSED


@lru_cache(maxsize=4096)
def _is_own(kind: type, forward: Any) -> bool:
    """Whether a class of a model file has the forward that is written there, and nobody has replaced or wrapped it."""
    of_class = next((one for one in kind.__mro__ if "forward" in vars(one)), kind)
    if not isinstance(forward, FunctionType) or of_class.__module__.partition(".")[0] == "torch":
        return False
    return forward.__globals__.get("__name__") == of_class.__module__ and not hasattr(forward, "__wrapped__")
