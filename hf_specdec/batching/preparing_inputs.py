"""What `generate` prepares of a prompt's inputs beside its tokens, of the whole prompt or of a part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from ..compat import cache_name_of
from ..engine.prompt_inputs import is_by_token
from ..generation.inherited import idle_options_of
from ..models.structure import execution_device
from .image_parts import parts_of_inputs
from .preparing import OF_THE_MANAGER, handed_over


def prepare_inputs(
    model: Any, prompt: list[int], values: dict[str, Any], num_tokens: int | None = None
) -> tuple[GenerationConfig, dict[str, Any]]:
    """
    Generation config and keyword arguments that `generate` hands to a decoding method for a prompt with inputs beside
    its tokens, `values`, or for its first `num_tokens` tokens: it may encode images already.

    Raises:
        ValueError: for inputs that `generate` refuses.
    """
    if num_tokens is not None:
        values = {
            name: value[..., :num_tokens] if is_by_token(value, len(prompt)) else value
            for name, value in values.items()
        }
        prompt = prompt[:num_tokens]
    device, own = execution_device(model), model.generation_config
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1}
    options |= idle_options_of(model)
    for name in (*OF_THE_MANAGER, "stop_strings", "prefill_chunk_size"):
        if getattr(own, name, None) is not None:
            options[name] = None  # overrides the model's own
    options |= {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    prepared = handed_over(model, prompt, None, options)
    config = prepared["generation_config"]
    not_passed = ("generation_config", "logits_processor", "stopping_criteria", cache_name_of(model))
    return config, {name: value for name, value in prepared.items() if name not in not_passed}


def prepare_start_of(model: Any, prompt: list[int], length: int) -> tuple[GenerationConfig, dict[str, Any]]:
    """What `prepare_inputs` returns for the first `length` tokens of a prompt, as a text."""
    return prepare_inputs(model, prompt[:length], {})


def prepare_more_inputs(
    model: Any,
    prompt: list[int],
    count: int,
    values: dict[str, Any],
    number: int,
    first: int,
    end: int,
    last: int | None = None,
) -> tuple[GenerationConfig, dict[str, Any]]:
    """
    `prepare_inputs` of a prompt with `count` images, of which the first `number` and the first tokens have been read,
    up to token `end`: the others alone are encoded, or those before image `last`, at the positions that they have in
    the prompt.
    """
    by_token = {name: value for name, value in values.items() if is_by_token(value, len(prompt))}
    others = {name: value for name, value in values.items() if name not in by_token}
    parts = parts_of_inputs(count, others)[number:last]
    rest = {
        name: torch.cat([part[name] for part in parts]) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in parts[0].items()
    }
    no_images = {name: value for name, value in values.items() if not _is_floating(value)}
    config, of_all = prepare_inputs(model, prompt, no_images, end)
    of_tokens = {name: value[..., first:end] for name, value in by_token.items()}
    _, own = prepare_inputs(model, prompt[first:end], rest | of_tokens)
    images = {name: value for name, value in own.items() if name in rest or name == "mm_encoder_outputs"}
    return config, of_all | images


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
