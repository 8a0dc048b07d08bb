"""Builds the tiny model of a pair, with weights that make its text tell faults apart."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .families import EXTRAS
from .registry import Pair
from .shrinking import parts_of, shrink


_QUERIES_AND_KEYS = ("q_proj", "k_proj", "query", "key", "qkv", "c_attn", "q_b_proj", "kv_b_proj")


def tiny_config(pair: Pair, **changes: Any) -> PreTrainedConfig:
    """The shrunk config of a pair, of the class that its model takes; `changes`: values of fields as in `EXTRAS`."""
    extras = EXTRAS.get(pair.model_type, {}) | changes
    made = {name[1:]: value for name, value in extras.items() if name.startswith("=")}
    config = pair.config_class(**copy.deepcopy(made))
    shrink(config)
    for part in parts_of(config):
        for name in ("tie_word_embeddings", "tie_encoder_decoder"):
            if name in vars(part):
                vars(part)[name] = False
        if not config.is_encoder_decoder and "is_decoder" in vars(part):
            part.is_decoder = True
    for path, value in extras.items():
        if not path.startswith("="):
            _put(config, path, copy.deepcopy(value))
    wanted = pair.model_class.config_class
    if not isinstance(config, wanted):
        config = next((part for part in parts_of(config) if isinstance(part, wanted)), config)
    return config


def _put(config: Any, path: str, value: Any) -> None:
    *places, name = path.split(".")
    for place in places:
        config = getattr(config, place)
    if isinstance(config, dict):
        config[name] = value
    else:
        vars(config)[name] = value


def tiny_model(
    pair: Pair, seed: int = 0, sharpness: float = 3.0, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """
    A random model. `sharpness` scales its weight matrices, and those of queries and keys once more: at 1 it hardly
    reacts to what stands where. It has no end token.
    """
    torch.manual_seed(seed)
    model = pair.model_class._from_config(tiny_config(pair, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                is_attention = any(part in name for part in _QUERIES_AND_KEYS)
                parameter.mul_(sharpness * (sharpness if is_attention else 1.0))
            elif parameter.is_floating_point():
                # As trained: no bias is zero, no norm is one.
                parameter.add_(torch.randn(parameter.shape) * (2.0 if name.endswith(("sinks", ".A")) else 0.2))
    model = model.to(dtype)
    try:
        model.set_experts_implementation("eager")  # the grouped kernels take no float64
    except (AttributeError, ValueError, KeyError):
        pass
    model.generation_config.pad_token_id, model.generation_config.num_beams = 0, 1
    model.generation_config.eos_token_id = None
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 1
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def noisy_copy(model: PreTrainedModel, noise: float = 0.1) -> PreTrainedModel:
    """A draft that agrees with a model often, but not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.numel() > 1 and parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(drawn * noise * parameter.std())
    return draft
