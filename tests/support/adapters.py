"""
LoRA adapters of random weights, and what plain `generate` writes with each of them. By functions of PEFT alone, since
those of transformers may want a later PEFT.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from .models import tiny_model


ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 4},
    "b": {"r": 2, "target_modules": ["q_proj", "o_proj"]},
    "c": {"r": 3, "use_rslora": True, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"up_proj": 7}},
}
"""Adapters of other ranks, layers and scalings."""


def lora_config(**options: Any) -> Any:
    """A `LoraConfig` whose adapter, with random weights, changes what a tiny model says."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    options = {"r": 4, "lora_alpha": 16, "target_modules": targets, "init_lora_weights": False} | options
    return peft.LoraConfig(**options)


def adapted(model: PreTrainedModel | None = None, **adapters: dict[str, Any]) -> Any:
    """A copy of a model (by default a tiny Llama), with these adapters (default: `ADAPTERS`), the first one active."""
    model = copy.deepcopy(tiny_model() if model is None else model)
    for name, options in (adapters or ADAPTERS).items():
        add(model, name, **options)
    activate(model, next(iter(adapters or ADAPTERS)))
    return model.eval()


def add(model: PreTrainedModel, name: str, **options: Any) -> None:
    """Loads an adapter into a model."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    with torch.random.fork_rng():
        torch.manual_seed(len(name) + ord(name[0]))
        peft.inject_adapter_in_model(lora_config(**options), model, name)
    model.to(model.dtype)


def layers_of(model: PreTrainedModel) -> list[Any]:
    """PEFT's layers in a model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def activate(model: PreTrainedModel, names: str | list[str] | None) -> None:
    """Makes adapters the active ones; None for no adapters."""
    for layer in layers_of(model):
        layer.enable_adapters(names is not None)
        if names is not None:
            layer.set_adapter(names)


def active_in(model: PreTrainedModel) -> set[tuple[str, ...]]:
    """The adapters that are active in each layer."""
    return {() if layer.disable_adapters else tuple(layer.active_adapters) for layer in layers_of(model)}


def alone(model: Any, adapter: str | list[str] | None, prompt: list[int], **options: Any) -> list[int]:
    """What plain `generate` writes with one adapter, with several or with none."""
    ((*active,),) = active_in(model)
    activate(model, adapter)
    try:
        ids = torch.tensor([prompt])
        options = {"do_sample": False} | options
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    finally:
        activate(model, active or None)
