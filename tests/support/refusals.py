"""Calls that are refused before any forward, and leave everything as it was."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

from .models import prompts


@contextmanager
def left_untouched(*models: Any, cache: Any = None) -> Iterator[None]:
    """Asserts that nothing inside runs a forward of these models or changes them, the random state, or a cache."""
    models = [model for model in models if isinstance(model, PreTrainedModel)]
    forwards: list[PreTrainedModel] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: forwards.append(module))
        for model in models
        for module in model.modules()
    ]
    before = [snapshot(model) for model in models]
    layers = [] if cache is None else copy.deepcopy(getattr(cache, "layers", []))
    random_state = torch.get_rng_state()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert not forwards, f"{type(forwards[0]).__name__} was run"
    assert [snapshot(model) for model in models] == before
    assert torch.equal(torch.get_rng_state(), random_state)
    for then, now in zip(layers, getattr(cache, "layers", []), strict=True):
        assert type(now) is type(then)
        assert now.is_initialized == then.is_initialized
        if now.is_initialized:
            assert torch.equal(now.keys, then.keys) and torch.equal(now.values, then.values)


def snapshot(model: PreTrainedModel) -> list[Any]:
    """What a call could leave behind on a model."""
    return [
        model.config.to_dict(),
        model.config._attn_implementation,
        [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")],
        model.generation_config.to_dict() if model.can_generate() else None,
        sorted(set(vars(model)) - {"prepare_inputs_for_generation"}),  # PEFT leaves its own behind in every call
        {name: parameter._version for name, parameter in model.named_parameters()},
    ]


def assert_refused(
    model: PreTrainedModel, options: dict[str, Any], *words: str, error: type[Exception] = ValueError
) -> None:
    """Asserts that a call raises an error that says all these words, and changes nothing."""
    assistant, cache = options.get("assistant_model"), options.get("past_key_values")
    with left_untouched(model, assistant, cache=cache), pytest.raises(error) as caught:
        model.generate(**({"max_new_tokens": 8, **prompts(1, 6)} | options))
    message = str(caught.value)
    assert type(caught.value) is error, message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def named(value: Any) -> str:
    """The same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))
