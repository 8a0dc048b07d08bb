"""RMSNorm by one kernel, with a gate or without: of modules that have nothing but a weight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from ..models.numbers import some_numbers
from .forward import Fused
from .trials import are_equal, double, has_tensors, may_run


Gating = tuple[int, str, str, bool]
"""Groups, scaling, activation, and whether the gate comes first; see `hf_specdec_kernels.gated_rms_norm`."""
_EPS = ("variance_epsilon", "eps")
_SMALL = 1e-3
"""Size of numbers beside which an eps shows."""


def is_like_norm(module: nn.Module) -> bool:
    """Whether a module has no parts, and a weight as its only parameter."""
    return not module._modules and list(module._parameters) == ["weight"]


def fused_norm(module: nn.Module, dtype: torch.dtype) -> Fused | None:
    """The fused forward of a norm of a model of this dtype; None if its own must run."""
    name = next((one for one in _EPS if isinstance(getattr(module, one, None), float)), None)
    weight: Any = module._parameters["weight"]
    if name is None or weight is None or weight.dim() != 1 or weight.dtype != dtype or has_tensors([module], "weight"):
        return None
    scaling, of_gate = _scaling_of(module, weight, name), _gating_of(module, weight, name)
    return None if scaling is None and of_gate is None else partial(_run, scaling, of_gate, name, dtype)


def _scaling_of(module: nn.Module, weight: torch.Tensor, eps: str) -> str | None:
    """How a norm multiplies by its weight, see `hf_specdec_kernels.rms_norm`; None if it is none of these."""
    from hf_specdec_kernels.rms_norm import SCALINGS, rms_norm_naive

    numbers, input = _trial_numbers(weight, 1)
    own = _own(module, numbers, input)
    for scaling in SCALINGS:
        if are_equal(own, rms_norm_naive(input, numbers, getattr(module, eps), scaling)):
            return scaling
    return None


def _gating_of(module: nn.Module, weight: torch.Tensor, eps: str) -> Gating | None:
    """The arithmetic of a norm that takes a gate, too; None if it takes none, or computes something else."""
    from hf_specdec_kernels.gated_rms_norm import ACTIVATIONS, SCALINGS, gated_rms_norm_naive

    numbers, input, gate = _trial_numbers(weight, 2)
    own, size = _own(module, numbers, input, gate), len(weight)
    if own is None:
        return None
    named = {value for value in vars(module).values() if type(value) is int and value > 0 and size % value == 0}
    groups = sorted({1, *named, *(size // value for value in named)})
    ways: Iterator[Gating] = product(groups, SCALINGS, ACTIVATIONS, (False, True))
    for way in ways:
        if are_equal(own, gated_rms_norm_naive(input, gate, numbers, getattr(module, eps), *way)):
            return way
    return None


def _trial_numbers(weight: torch.Tensor, count: int) -> list[torch.Tensor]:
    """A weight like this one, and inputs `[4, size]`, of which half show an eps."""
    size = len(weight)
    numbers = some_numbers((size,), 0.7).to(weight.dtype)
    inputs = [some_numbers((4, size), step).to(weight.dtype) for step in (1.0, 0.3)[:count]]
    inputs[0][2:] *= _SMALL
    return [numbers, *inputs]


def _own(module: nn.Module, weight: torch.Tensor, *inputs: torch.Tensor) -> Any:
    """What a norm's own forward makes of inputs with another weight; None if it does not take them."""
    try:
        return type(module).forward(double(module, _parameters={"weight": weight}), *inputs)
    except Exception:  # noqa: BLE001  (code of others, to which our numbers may be anything)
        return None


def _run(
    scaling: str | None,
    of_gate: Gating | None,
    eps: str,
    dtype: torch.dtype,
    module: Any,
    *args: Any,
    **options: Any,
) -> Any:
    weight = module.weight
    fits = not options and 0 < len(args) < 3 and may_run(dtype, *args, weight)
    if fits and args[0].shape[-1:] == weight.shape and args[-1].shape == args[0].shape:
        if len(args) == 1 and scaling is not None:
            from hf_specdec_kernels.rms_norm import unchecked

            return unchecked(*args, weight, getattr(module, eps), scaling)
        if len(args) == 2 and of_gate is not None:
            from hf_specdec_kernels.gated_rms_norm import unchecked as gated

            states, gate = args
            return gated(states, gate, weight, getattr(module, eps), *of_gate)
    return type(module).forward(module, *args, **options)
