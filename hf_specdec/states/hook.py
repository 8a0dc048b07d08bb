"""
The functions of transformers' model files that mixers call for the arithmetic of many tokens. While a model runs over
trees, replacements stand in its file: within `running_over` they run over the nodes, elsewhere they call the original.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..models.modules import modules_of
from .convolution import FUNCTION
from .levels import by_levels
from .recurrence import Recurrence
from .recurrences import RECURRENCES


if TYPE_CHECKING:
    from ..cache.state_layers import StateLayer
    from ..cache.tree_cache import TreeCache


class _Running(threading.local):
    """The forward over a tree that runs in this thread, and where it is."""

    cache: TreeCache | None = None
    layer: StateLayer | None = None
    state_idx = 0
    has_convolved = False
    num_scans = 0
    forgets = False


_running = _Running()
_lock = threading.Lock()
_replaced: dict[str, tuple[dict[str, Callable], set[object]]] = {}
"""By file (a module's name): the functions that are replaced, and the calls that need the replacements."""


@contextmanager
def running_over(cache: TreeCache) -> Iterator[None]:
    """A context in which the functions of this thread run over the nodes of a cache's `topology`."""
    before = vars(_running).copy()
    _running.cache, _running.layer = cache, None
    try:
        yield
        _check_left()
    finally:
        vars(_running).clear()
        vars(_running).update(before)


def running_cache() -> TreeCache | None:
    """The cache of the forward over a tree that runs in this thread."""
    return _running.cache


def enter(layer: StateLayer, state_idx: int, inputs: torch.Tensor) -> None:
    """Takes note that a mixer has handed the inputs of its convolution to a layer of the cache."""
    _check_left()
    if _running.cache is not layer.cache:
        raise _not_followed(layer)
    _running.layer, _running.state_idx = layer, state_idx
    _running.has_convolved, _running.num_scans, _running.forgets = False, 0, False


def enter_plainly(layer: StateLayer, state_idx: int, had_state: bool) -> None:
    """Takes note of a layer in a plain forward, whose function may take no earlier state (`Recurrence.continues`)."""
    is_mine = _running.cache is layer.cache
    _running.layer, _running.state_idx = layer if is_mine else None, state_idx
    _running.has_convolved, _running.num_scans, _running.forgets = True, 0, had_state


def leave(layer: StateLayer, state_idx: int) -> None:
    """Checks that the recurrence of a layer has run over the nodes."""
    if _running.layer is not layer or _running.state_idx != state_idx or not _running.num_scans:
        raise _not_followed(layer)


def _check_left() -> None:
    if _running.layer is not None and not _running.has_convolved:
        raise _not_followed(_running.layer)


def _not_followed(layer: StateLayer) -> ValueError:
    index = next((index for index, one in enumerate(layer.cache.layers) if one is layer), None)
    return ValueError(
        f"`assistant_model`: layer {index} changes its state by code of its own, which cannot run over a tree. Call "
        "`generate` without `assistant_model`."
    )


# --------------------------------------------------------------------------------------------------------- replacing


def files_with_mixers(model: nn.Module) -> list[str]:
    """Names of the model files of a model with functions that can be replaced."""
    files = {type(module).__module__ for module in modules_of(model) if hasattr(module, "layer_idx")}
    return sorted(name for name in files if _functions_of(name))


def mixers_of_their_own(model: nn.Module) -> list[nn.Module] | None:
    """
    Modules of a model that change a cache's states otherwise than by functions that can be replaced, and run level by
    level (`levels`); None, if no module changes states of a cache at all.
    """
    kinds: dict[nn.Module, Any] = {module: type(module) for module in modules_of(model)}
    called = {module: _names_in(kind) for module, kind in kinds.items()}
    mixers = {module: names for module, names in called.items() if names & {_UPDATES_CONV, _UPDATES_STATE}}
    recurrences = {name for recurrence in RECURRENCES for name in recurrence.functions}
    found = [
        module
        for module, names in mixers.items()
        if FUNCTION not in names or (_UPDATES_STATE in names and not names & recurrences)
    ]
    return found if mixers else None


def recurrences_of(model: nn.Module) -> dict[int, Recurrence]:
    """The recurrence of every layer that has one, by the layer's index."""
    found: dict[int, Recurrence] = {}
    for module in modules_of(model):
        kind: Any = type(module)
        index, names = getattr(module, "layer_idx", None), _names_in(kind)
        if index is not None and _UPDATES_STATE in names:
            found |= [(index, one) for one in RECURRENCES if names.intersection(one.functions)]
    return found


_UPDATES_CONV, _UPDATES_STATE = "update_conv_state", "update_recurrent_state"


@cache
def _names_in(kind: Any) -> frozenset[str]:
    """Global names and attributes that the methods of a model's class read."""
    own = [one for one in kind.__mro__ if one.__module__.rpartition(".")[2].startswith("modeling_")]
    methods = [value for one in own for value in vars(one).values() if callable(value)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def _functions_of(name: str) -> dict[str, Callable]:
    """The functions of a file that are replaced, as they stand there now."""
    found = vars(sys.modules[name]) if name in sys.modules else {}
    return {function: found[function] for function in _replacements if function in found}


@contextmanager
def states_over_trees(model: nn.Module) -> Iterator[None]:
    """
    A context for forwards of a model over trees: replaces the functions in its files, and lets mixers without them
    run level by level. Of the calls of several threads, the first one replaces functions, and the last one restores
    them.
    """
    with by_levels(mixers_of_their_own(model) or []), _replacing(model):
        yield


@contextmanager
def _replacing(model: nn.Module) -> Iterator[None]:
    files, call = files_with_mixers(model), object()
    try:
        with _lock:
            for name in files:
                originals, calls = _replaced.setdefault(name, (_functions_of(name), set()))
                calls.add(call)
                for function, original in originals.items():
                    if vars(sys.modules[name])[function] is original:
                        setattr(sys.modules[name], function, _replacements[function](original))
        yield
    finally:  # of an interrupt while functions are replaced, too
        with _lock:
            for name in files:
                originals, calls = _replaced.get(name, ({}, set()))
                calls.discard(call)
                if calls:
                    continue
                for function, original in originals.items():
                    setattr(sys.modules[name], function, original)
                _replaced.pop(name, None)


def _convolving(original: Callable) -> Callable:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        layer = _running.layer
        if layer is None or _running.has_convolved:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        _running.has_convolved = True
        return layer.convolve(_running.state_idx, hidden_states, weight, bias, activation)

    return torch.compiler.disable(causal_conv1d_fn)


def _scanning(recurrence: Recurrence) -> Callable[[Callable], Callable]:
    def replacing(original: Callable) -> Callable:
        def function(*args: Any, **kwargs: Any) -> Any:
            layer = _running.layer
            if layer is None or not (layer.cache.topology or (_running.forgets and not recurrence.continues)):
                return original(*args, **kwargs)
            _running.num_scans += 1
            return layer.scan(_running.state_idx, recurrence, _running.num_scans - 1, *args, **kwargs)

        return torch.compiler.disable(function)

    return replacing


_replacements: dict[str, Callable[[Callable], Callable]] = {FUNCTION: _convolving} | {
    name: _scanning(recurrence) for recurrence in RECURRENCES for name in recurrence.functions
}
