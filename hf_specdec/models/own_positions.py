"""Positions of models that take `position_ids`, but whose `generate` drops them and counts by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from ..compat import cache_name_of
from .shadow import Shadow
from .structure import execution_device, names_positions, takes_positions


@dataclass(frozen=True)
class Preparation:
    """
    What a model's `prepare_inputs_for_generation` makes of the inputs of two tokens behind a prompt of one.

    Args:
        keeps_tokens_and_cache (`bool`): whether it hands on tokens and cache as they are.
        drops_positions (`bool`): whether it drops `position_ids`.
        first_position (`int`, *optional*): the position that the first token has in plain `generate`, if it drops
            them: a model may count from an offset. 0 for all other models. None if nodes cannot be given positions,
            since the model does not read those that it takes.
        added (`int`): what it adds to `position_ids`, as PaliGemma adds 1.
    """

    keeps_tokens_and_cache: bool = True
    drops_positions: bool = False
    first_position: int | None = 0
    added: int = 0


_found: WeakKeyDictionary[PreTrainedModel, Preparation] = WeakKeyDictionary()


def preparation_of(model: PreTrainedModel) -> Preparation:
    """How a model prepares its inputs, found once per model."""
    if takes_positions(model) and not names_positions(model):
        return Preparation(drops_positions=True)  # `generate` looks for the name
    if model.config.is_encoder_decoder:  # checked by the kinds that `check_target` lets pass
        return Preparation()
    if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        return Preparation()
    if model not in _found:
        try:
            _found[model] = _look(model)
        except Exception:  # it may need arguments of the call: the first forward shows what it does
            return Preparation()
    return _found[model]


def counts_by_mask(model: PreTrainedModel) -> bool:
    """
    Whether the decoder of an encoder-decoder model counts the positions of a text from its mask, as Whisper's does;
    others count slots, padding included.
    """
    return model.config.model_type == "whisper"


def _look(model: PreTrainedModel) -> Preparation:
    device, cache = execution_device(model), DynamicCache()
    cache.update(*torch.zeros(2, 1, 1, 1, 1, device=device), layer_idx=0)
    given: dict[str, Any] = {
        "input_ids": torch.tensor([[1, 2]], device=device),
        "position_ids": torch.tensor([[1, 2]], device=device),
        "attention_mask": torch.zeros(1, 1, 2, 3, device=device),
        "use_cache": True,
        cache_name_of(model): cache,
    }
    prepared = model.prepare_inputs_for_generation(**given, is_first_iteration=False)
    tokens = prepared.get("input_ids")
    keeps = (
        tokens is not None and torch.equal(tokens, given["input_ids"]) and prepared.get(cache_name_of(model)) is cache
    )
    positions = prepared.get("position_ids")
    drops = positions is None
    added = set() if drops else set((positions[..., -2:] - torch.tensor([1, 2], device=device)).flatten().tolist())
    return Preparation(
        keeps, drops, _found_by_forwards(model) if keeps and drops else 0, added.pop() if len(added) == 1 else 0
    )


@torch.no_grad()
def _found_by_forwards(model: PreTrainedModel) -> int | None:
    """
    Compares logits of positions that the model chooses with those of given ones, on two tokens. The forwards are those
    of a shadow: no hook runs, and no dropout.
    """
    shadow = Shadow(model, has_data=True).model
    device, pad = execution_device(model), getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    # Two tokens, whose values differ; padding may have a position of its own.
    tokens = torch.tensor([[token for token in range(3) if token != pad][:2]], device=device)

    def logits(positions: list[int] | None) -> torch.Tensor:
        given = None if positions is None else torch.tensor([positions], device=device)
        outputs = shadow(input_ids=tokens, position_ids=given, use_cache=False, return_dict=True)
        return outputs.logits

    expected = logits(None)
    for first in {0: None, (pad or 0) + 1: None}:
        if torch.equal(logits([first, first + 1]), expected):
            return None if torch.equal(logits([first, first + 3]), expected) else first
    return None
