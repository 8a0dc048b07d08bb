"""Positions of models that take `position_ids`, but whose `generate` drops them and counts by itself."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from ..compat import CACHE
from .models import execution_device


_known: WeakKeyDictionary[PreTrainedModel, int | None] = WeakKeyDictionary()


def first_position(model: PreTrainedModel) -> int | None:
    """
    The position that the first token has in plain `generate`, if the model's `prepare_inputs_for_generation` drops
    `position_ids`: a model may count from an offset. 0 for all other models. None if nodes cannot be given positions,
    since the model does not read those that it takes.
    """
    if not drops_positions(model):
        return 0
    if model not in _known:
        _known[model] = _found_by_forwards(model)
    return _known[model]


def drops_positions(model: PreTrainedModel) -> bool:
    """Whether the model's `prepare_inputs_for_generation` drops `position_ids`."""
    given, prepared = _prepared(model)
    return prepared.get("position_ids") is None


def keeps_tokens_and_cache(model: PreTrainedModel) -> bool:
    """Whether the model's `prepare_inputs_for_generation` hands on tokens and cache as they are."""
    given, prepared = _prepared(model)
    tokens = prepared.get("input_ids")
    return tokens is not None and tokens.shape == given["input_ids"].shape and prepared.get(CACHE) is given[CACHE]


def _prepared(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs of one token behind a prompt, and what the model's `prepare_inputs_for_generation` makes of them."""
    device = execution_device(model)
    given = {
        "input_ids": torch.zeros(1, 1, dtype=torch.long, device=device),
        "position_ids": torch.zeros(1, 1, dtype=torch.long, device=device),
        "attention_mask": torch.zeros(1, 1, 1, 1, device=device),
        "use_cache": True,
        CACHE: DynamicCache(),
    }
    if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        return given, given
    return given, model.prepare_inputs_for_generation(**given, is_first_iteration=False)


@torch.no_grad()
def _found_by_forwards(model: PreTrainedModel) -> int | None:
    """Compares logits of positions that the model chooses with those of given ones, on two tokens."""
    device, pad = execution_device(model), getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    # Two tokens, whose values differ; padding may have a position of its own.
    tokens = torch.tensor([[token for token in range(3) if token != pad][:2]], device=device)

    def logits(positions: list[int] | None) -> torch.Tensor:
        given = None if positions is None else torch.tensor([positions], device=device)
        outputs = model(input_ids=tokens, position_ids=given, use_cache=False, return_dict=True)
        return outputs.logits

    expected = logits(None)
    for first in {0: None, (pad or 0) + 1: None}:
        if torch.equal(logits([first, first + 1]), expected):
            return None if torch.equal(logits([first, first + 3]), expected) else first
    return None
