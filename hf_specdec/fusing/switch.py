"""The switch of a model's modules to fused forwards and back."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .forward import Fused, FusedForward, here
from .modules import fused_forwards


@dataclass(eq=False)
class _Call:
    """
    Calls that run a model at present.

    Args:
        count (`int`): how many.
        forwards (`list`, *optional*): its modules with their fused forwards; None before the first one has run.
    """

    count: int = 0
    forwards: list[tuple[nn.Module, Fused]] | None = None


_calls: weakref.WeakKeyDictionary[nn.Module, _Call] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_changed = threading.Condition(_lock)
_compiled: Counter[int] = Counter()
"""Modules (`id`) that run compiled at present, and in how many contexts."""


@contextmanager
def own_layers(model: nn.Module) -> Iterator[None]:
    """
    A context in which no thread fuses layers of a model, because this one runs them compiled: the compiler takes what
    it finds in modules for a condition of its code, and must not see a `forward` come and go. Begins when the fused
    forwards of other threads over these modules have ended.
    """
    modules = list(model.modules())
    with _changed:
        _compiled.update(map(id, modules))  # from now on, no forward of another thread fuses them
    try:
        with _changed:
            _changed.wait_for(lambda: here.depth > 0 or not any(map(_is_fused, modules)))
        yield
    finally:
        with _changed:
            for module in modules:
                _compiled[id(module)] -= 1
                if not _compiled[id(module)]:
                    del _compiled[id(module)]


def _is_fused(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, FusedForward) and forward.is_of(module) and forward.calls > 0


@contextmanager
def modules_kept(model: nn.Module) -> Iterator[None]:
    """
    A context of a call, during which nobody changes a model's modules: `fused_layers` looks at them in its first
    forward, and not in every one.
    """
    with _lock:
        call = _calls.setdefault(model, _Call())
        call.count += 1
        call.forwards = None  # they may have been changed since
    try:
        yield
    finally:
        with _lock:
            call.count -= 1
            if call.count == 0:
                del _calls[model]


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """
    Fuses a model's layers inside the context, in this thread only, unless gradients are recorded: the kernels have
    none. A module that has a `forward` of somebody else, or runs compiled in a thread (`own_layers`), is left alone.
    Calls of several threads on one model are counted: the first call switches, the last call restores.
    """
    if torch.is_grad_enabled():
        yield
        return
    switched: list[tuple[nn.Module, FusedForward]] = []
    with _lock:
        for module, fused in _forwards_of(model):
            forward = vars(module).get("forward")
            if id(module) in _compiled:
                continue
            if forward is None:
                forward = vars(module)["forward"] = FusedForward(module, fused)
            elif not isinstance(forward, FusedForward):
                continue
            forward.calls += 1
            switched.append((module, forward))
    here.depth += 1
    try:
        yield
    finally:
        here.depth -= 1
        with _changed:
            for module, forward in switched:
                forward.calls -= 1
                if forward.calls == 0 and vars(module).get("forward") is forward:
                    del vars(module)["forward"]
            _changed.notify_all()


def _forwards_of(model: nn.Module) -> list[tuple[nn.Module, Fused]]:
    call = _calls.get(model)
    if call is None:
        return fused_forwards(model)
    if call.forwards is None:
        call.forwards = fused_forwards(model)
    return call.forwards
