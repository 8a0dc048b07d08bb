"""The switch of a model's modules to fused forwards and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .modules import Fused, fused_forwards


class FusedForward:
    """
    The `forward` of a module while a model is switched. It is fused in threads that run our forwards, and the module's
    own in all others, and where it is compiled. Copies of the module that are made meanwhile have their own.

    Args:
        module (`nn.Module`): the module.
        fused (`Callable`): takes the module's place in front of the arguments.
    """

    def __init__(self, module: nn.Module, fused: Fused):
        self._module, self._fused, self.calls = module, fused, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not _here.depth:
            return type(self._module).forward(self._module, *args, **options)
        return self._fused(self._module, *args, **options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self._module, "forward")  # that of the class: the copy has no attributes yet


class _Here(threading.local):
    depth = 0
    """How many of the contexts are open in this thread."""


_here = _Here()
_lock = threading.Lock()


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """
    Fuses a model's layers inside the context, in this thread only, unless gradients are recorded: the kernels have
    none. A module that has a `forward` of somebody else is left alone. Calls of several threads on one model are
    counted: the first call switches, the last call restores.
    """
    if torch.is_grad_enabled():
        yield
        return
    switched: list[tuple[nn.Module, FusedForward]] = []
    with _lock:
        for module, fused in fused_forwards(model):
            forward = vars(module).get("forward")
            if forward is None:
                forward = vars(module)["forward"] = FusedForward(module, fused)
            elif not isinstance(forward, FusedForward):
                continue
            forward.calls += 1
            switched.append((module, forward))
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _lock:
            for module, forward in switched:
                forward.calls -= 1
                if forward.calls == 0 and vars(module).get("forward") is forward:
                    del vars(module)["forward"]
