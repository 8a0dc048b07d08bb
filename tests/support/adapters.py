"""LoRA adapters of random weights, and what plain `generate` writes with each of them."""

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
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for name, options in (adapters or ADAPTERS).items():
            model.add_adapter(lora_config(**options), name)
    model.set_adapter(next(iter(adapters or ADAPTERS)))
    return model.to(model.dtype).eval()


def alone(model: Any, adapter: str | None, prompt: list[int], **options: Any) -> list[int]:
    """What plain `generate` writes with one adapter, or with none."""
    active = model.active_adapters()
    try:
        if adapter is None:
            model.disable_adapters()
        else:
            model.set_adapter(adapter)
        ids = torch.tensor([prompt])
        options = {"do_sample": False} | options
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    finally:
        model.enable_adapters()
        model.set_adapter(active)
