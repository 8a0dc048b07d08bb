"""Walking through a model at every call, where torch's own iterators take milliseconds: they make up names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, each once, in no order that anybody should rely on."""
    found, left = {model: None}, [model]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return list(found)


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Its parameters; those that modules share as often as they do."""
    for module in modules_of(model):
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def buffers_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Its buffers, likewise."""
    for module in modules_of(model):
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
