"""Shadows of models: copies without hooks, and by default without data, whose forwards compute shapes alone."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from .modules import modules_of


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_INSTANCES = ("forward", "_old_forward", "_hf_hook", "__call__")
"""Attributes by which tools replace the forward of one module."""


class Shadow:
    """
    A copy of a model, by default with its weights on "meta". Its modules are copies of the model's, with the forwards
    of their classes, in evaluation mode and without hooks; its configs are copies, too. A forward of it changes
    nothing of the model and draws no random numbers.

    Args:
        model (`nn.Module`): the model; without data it may be quantized, wrapped, sharded or offloaded.
        dtype (`torch.dtype`, *optional*): dtype of the floating-point weights on "meta", if it is not their own.
        has_data (`bool`, *optional*, defaults to `False`): whether the copy holds the model's weights themselves.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None, has_data: bool = False):
        self._dtype, self.has_data = dtype, has_data
        self.running: list[nn.Module] = []
        """Shadows that are running, the innermost last."""
        self._call = _calling_forward(self.running)
        self._classes: dict[type, type] = {}
        self._copies: dict[int, Any] = {}
        """Copies of configs by `id`, as `copy.deepcopy` keeps them."""
        originals = modules_of(model)
        self._shadows = {id(module): self._empty(module) for module in originals}
        for module in originals:
            self._fill(self._shadows[id(module)], module)
        self.model: Any = self._shadows[id(model)]
        self._originals = {id(self._shadows[id(module)]): module for module in originals}

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The copied configs, those of parts included."""
        return [one for one in self._copies.values() if isinstance(one, PreTrainedConfig)]

    def original_of(self, shadow: nn.Module) -> nn.Module:
        """The model's own module."""
        return self._originals[id(shadow)]

    def _empty(self, module: nn.Module) -> nn.Module:
        if not self.has_data and _is_opaque(module):
            return _AnyLinear(cast(int, module.out_features))
        kind = type(module)
        if kind not in self._classes:
            # Calls go to `forward` alone: no hooks, of the module or of all modules, and no checkpointing.
            self._classes[kind] = type(kind.__name__, (kind,), {"__call__": self._call, "__module__": kind.__module__})
        return nn.Module.__new__(self._classes[kind])

    def _fill(self, shadow: nn.Module, module: nn.Module) -> None:
        if isinstance(shadow, _AnyLinear):
            return
        state = {name: self._value(value, shadow) for name, value in vars(module).items() if name not in _OF_INSTANCES}
        for name in _HOOKS:
            state[name] = OrderedDict()
        for name in ("_parameters", "_buffers", "_modules"):
            state[name] = {key: self._value(value, shadow) for key, value in vars(module)[name].items()}
        shadow.__dict__.update(state, training=False)

    def _value(self, value: Any, shadow: nn.Module) -> Any:
        """The shadow's counterpart of an attribute."""
        if isinstance(value, torch.Tensor):
            return value if self.has_data else self._without_data(value)
        if isinstance(value, nn.Module):
            return self._shadows.get(id(value), value)
        if isinstance(value, PreTrainedConfig):
            return copy.deepcopy(value, self._copies)
        if isinstance(value, MethodType) and id(value.__self__) in self._shadows:
            return MethodType(value.__func__, self._shadows[id(value.__self__)])
        if type(value) in (list, tuple):
            return type(value)(self._value(one, shadow) for one in value)
        return value

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        dtype = self._dtype if self._dtype is not None and local.dtype.is_floating_point else local.dtype
        return torch.empty(local.shape, dtype=dtype, device="meta")


def _calling_forward(running: list[nn.Module]) -> Callable:
    """A `__call__` of modules that notes which of them run, and without data passes by experts that count tokens."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running.append(module)
        try:
            return module.forward(*args, **kwargs)
        except RuntimeError:
            if not _are_of_experts(args):
                raise
            return torch.zeros_like(args[0])
        finally:
            running.pop()

    return call


def _are_of_experts(args: tuple[Any, ...]) -> bool:
    """Whether arguments are those of experts, states and the numbers of each token's experts, without data."""
    if len(args) < 3 or not all(isinstance(one, torch.Tensor) and one.is_meta for one in args):
        return False
    return args[0].is_floating_point() and not args[1].is_floating_point()


def _is_opaque(module: nn.Module) -> bool:
    """Whether a linear layer holds its weights in a form of its own, as quantized ones do."""
    if not isinstance(getattr(module, "out_features", None), int) or module._modules:
        return False
    weight = module._parameters.get("weight")
    return weight is None or weight.dim() != 2 or not weight.dtype.is_floating_point


class _AnyLinear(nn.Module):
    """Stands for a linear layer whose weights are quantized, by the size of its output."""

    def __init__(self, out_features: int):
        super().__init__()
        self.out_features = out_features

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return inputs.new_empty(*inputs.shape[:-1], self.out_features)
