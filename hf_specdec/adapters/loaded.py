"""The LoRA adapters that PEFT has put into a model, and those among them that requests can choose."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import nn


Choice = str | None | EllipsisType
"""The adapter of a request: its name, None for the model without adapters, `...` for those that are active."""


@dataclass
class LoadedAdapters:
    """
    The adapters of a model at one time.

    Args:
        layers (`list`): PEFT's layers of which requests can choose the adapter.
        names (`list[str]`): all adapters, in the order in which they were loaded.
        faults (`dict[str, str]`): why requests cannot choose an adapter, for those that they cannot.
        active (`set[str]`): those that are active, in any layer.
        merged (`set[str]`): those that are merged into the model's weights.
    """

    layers: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    merged: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module) -> LoadedAdapters:
        """The adapters of a model as it is now."""
        loaded = cls()
        if "peft" not in sys.modules:
            return loaded
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        for place, module in model.named_modules():
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                loaded._add(module, place)
        return loaded

    @property
    def served(self) -> list[str]:
        """The adapters that requests can choose."""
        return [name for name in self.names if name not in self.faults]

    @property
    def obstacle(self) -> str | None:
        """Why requests can choose no adapter at all; None if they can."""
        if self.merged:
            return f"{_named(self.merged)} is merged into the model's weights. Call `unmerge_adapter` first."
        stuck = [name for name in self.names if name in self.active and name in self.faults]
        if stuck:
            return f"{stuck[0]!r} is active, and {self.faults[stuck[0]]}. Activate another, or disable adapters."
        return None

    def error_of(self, choice: Choice) -> str | None:
        """Why a request cannot have this adapter; None if it can."""
        if choice is ... or (choice is None and not self.names):
            return None
        if choice is not None and choice not in self.names:
            known = _named(self.served) if self.served else "none"
            return f"`adapter={choice!r}` is not loaded into the target. Loaded: {known}. Choose one, or None."
        if choice is not None and choice in self.faults:
            fault = self.faults[choice]
            return f"`adapter={choice!r}`: requests cannot choose it, since it {fault}. Activate it instead."
        obstacle = self.obstacle
        return None if obstacle is None else f"`adapter={choice!r}`: requests cannot choose one, since {obstacle}"

    def _add(self, module: Any, place: str) -> None:
        """Takes note of one of PEFT's modules."""
        own = [name for name in _names_in(module) if name not in self.names]
        self.names += own
        self.merged.update(module.merged_adapters)
        if not module.disable_adapters:
            self.active.update(module.active_adapters)
        is_served = False
        for name in _names_in(module):
            fault = _fault_of(module, name, place)
            if fault is None:
                is_served = True
            else:
                self.faults.setdefault(name, fault)
        if is_served:
            self.layers.append(module)


def _names_in(module: Any) -> list[str]:
    """The adapters that have weights in one of PEFT's modules, in the order in which they were loaded."""
    found = module._get_available_adapters()
    order = list(module.lora_A) if isinstance(getattr(module, "lora_A", None), nn.ModuleDict) else []
    return [name for name in order if name in found] + sorted(found - set(order))


def _fault_of(module: Any, name: str, place: str) -> str | None:
    """Why an adapter cannot be chosen, from one module in which it has weights; None if nothing keeps it."""
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(module, BaseTunerLayer):
        return f"trains {place} itself (`modules_to_save`, `trainable_token_indices`)"
    if not isinstance(module, lora.LoraLayer):
        return f"is no LoRA but {type(module).__module__.split('.')[2]}, at {place}"
    if name in module.lora_variant:
        variant = type(module.lora_variant[name]).__name__
        return f"is a variant of LoRA at {place} ({variant}), such as DoRA"
    if not isinstance(module, lora.Linear):
        return f"adapts {place}, which is no linear layer ({type(module.get_base_layer()).__name__})"
    if "experts" in place.split("."):
        return f"adapts an expert ({place})"
    down, up = module.lora_A[name], module.lora_B[name]
    if up.bias is not None:
        return f"has a bias at {place} (`lora_bias`)"
    if not all(type(one.weight) in (nn.Parameter, torch.Tensor) for one in (down, up)) or down.weight.is_meta:
        return f"has weights at {place} that are sharded, quantized or offloaded"
    return None


def _named(names: Any) -> str:
    return ", ".join(map(repr, names))
