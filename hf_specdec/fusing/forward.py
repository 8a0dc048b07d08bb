"""`FusedForward`: what stands in a module while its model is switched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..kernels import DEVICES


Fused = Callable[..., Any]
"""A forward with the module as its first argument."""


class _Here(threading.local):
    depth = 0
    """How many contexts of `fused_layers` are open in this thread."""


here = _Here()


def is_fused_here(states: torch.Tensor) -> bool:
    """Whether kernels compute what a head makes of states beside its modules, in this thread and for this dtype."""
    if torch.compiler.is_compiling() or not here.depth or torch.is_grad_enabled():
        return False
    return type(states) is torch.Tensor and states.dtype in DEVICES.get(states.device.type, ())


class FusedForward:
    """
    The `forward` of a module while a model is switched. It is fused in threads that run our forwards, and the module's
    own in all others, where it is compiled and where gradients are recorded. Copies of the module that are made
    meanwhile have their own.

    Args:
        module (`nn.Module`): the module.
        fused (`Callable`): takes the module's place in front of the arguments.
    """

    def __init__(self, module: nn.Module, fused: Fused):
        self._module, self._fused, self.calls = module, fused, 0

    def is_of(self, module: nn.Module) -> bool:
        """Whether it stands in this module, and not in a shallow copy."""
        return self._module is module

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not here.depth or torch.is_grad_enabled():
            return type(self._module).forward(self._module, *args, **options)
        return self._fused(self._module, *args, **options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self._module, "forward")  # that of the class: the copy has no attributes yet
