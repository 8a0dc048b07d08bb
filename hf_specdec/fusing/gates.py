"""Gated MLPs with one kernel for the activation and the product; their layers run as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..models.modules import modules_of
from ..models.numbers import some_numbers
from .forward import Fused
from .trials import are_equal, double, has_tensors, may_run


Names = tuple[str, str | None, str]
"""Names of an MLP's layers: gate, the other input (None: both in one layer), and output."""
_GATED: tuple[Names, ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", None, "down_proj"),
)
_LARGE = torch.tensor([[1.0], [12.0], [120.0]], device="cpu")
"""Sizes of numbers that show whether a gate is clamped; their products are finite in float16."""


def names_of_gated(module: nn.Module) -> Names | None:
    """Names of an MLP's layers; None for other modules."""
    return next((names for names in _GATED if all(name is None or name in module._modules for name in names)), None)


def passed_by(module: nn.Module, names: Names) -> list[nn.Module]:
    """The parts of an MLP that are none of its three layers, and all modules in them."""
    others = [part for name, part in module._modules.items() if name not in names and part is not None]
    return [one for part in others for one in modules_of(part)]


def fused_gate(module: nn.Module, names: Names, dtype: torch.dtype) -> Fused | None:
    """The fused forward of an MLP with layers of these names in a model of this dtype; None if its own must run."""
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


def _activation_of(module: nn.Module, names: Names, dtype: torch.dtype) -> str | None:
    """The activation of a gated MLP, see `hf_specdec_kernels.gated_product`; None if it computes something else."""
    from hf_specdec_kernels.gated_product import ACTIVATIONS, gated_product_naive

    read = [module, *passed_by(module, names)]
    if has_tensors(read):
        return None
    input, numbers = some_numbers((3, 8)).to(dtype), (_LARGE * some_numbers((3, 256))).to(dtype)
    gates, ups = numbers.chunk(2, dim=-1)
    layers = [numbers] if names[1] is None else [gates, ups]
    own = _own_product(double(module, _modules=module._modules | {names[2]: nn.Identity()}), names, layers, input)
    for activation in ACTIVATIONS:
        if are_equal(own, gated_product_naive(gates, ups, activation)):
            return activation
    return None


def _own_product(module: nn.Module, names: Names, outputs: list[torch.Tensor], input: torch.Tensor) -> Any:
    """An MLP's own forward, where its layers before the product have these outputs."""
    layers = {name: _Gives(output, input) for name, output in zip(filter(None, names[:2]), outputs, strict=True)}
    return type(module).forward(double(module, _modules=module._modules | layers), input)


def _run_gate(activation: str, names: Names, dtype: torch.dtype, module: Any, *args: Any, **options: Any) -> Any:
    if len(args) != 1 or options:
        return type(module).forward(module, *args, **options)
    outputs = [module._modules[name](args[0]) for name in filter(None, names[:2])]
    gates, ups = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    if not may_run(dtype, gates, ups) or gates.shape != ups.shape:
        return _own_product(module, names, outputs, args[0])
    from hf_specdec_kernels.gated_product import unchecked

    return module._modules[names[2]](unchecked(gates, ups, activation))
