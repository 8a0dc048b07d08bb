"""How a model's own forward reads a prompt, where chunks behind a cache read it otherwise."""

from __future__ import annotations

import sys
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .modules import modules_of
from .shadow import Shadow
from .structure import execution_device


def bidirectional_layers(model: PreTrainedModel) -> list[str]:
    """Names of the decoder's self-attention layers that may attend to later tokens, too, as in a prompt's prefix."""
    configs = {id(model.config), id(model.config.get_text_config(decoder=True))}
    return [
        name
        for name, module in model.named_modules()
        if getattr(module, "is_causal", None) is False
        and hasattr(module, "layer_idx")
        and id(getattr(module, "config", None)) in configs
        and "cross" not in name.lower()
    ]


@torch.no_grad()
def looks_ahead(model: PreTrainedModel) -> bool:
    """
    Whether a token of a prompt attends to later ones: layers that may do so under sdpa, which has no mask for a prompt
    without padding, but perhaps not under eager attention. Compares the logits of a first token with two others behind
    it. The forwards are those of a shadow: no hook runs, and no dropout.
    """
    if not bidirectional_layers(model):
        return False
    tokens = torch.tensor([[1, 2], [1, 3]], device=execution_device(model))
    try:
        shadow = Shadow(model, has_data=True).model
        inputs = {"attention_mask": torch.ones_like(tokens[:1]), "use_cache": False, "return_dict": True}
        first, other = (shadow(input_ids=row[None], **inputs).logits[0, 0] for row in tokens)
        return not torch.equal(first, other)
    except Exception:  # noqa: BLE001  (it may need arguments of the call)
        return True


def window_left_out(model: PreTrainedModel) -> int | None:
    """The sliding window that a model has while it writes, but not while it reads a prompt; None if there is none."""
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    if not window:
        return None
    files = {type(module).__module__ for module in modules_of(model) if hasattr(module, "layer_idx")}
    makes_masks = any(
        hasattr(sys.modules.get(name), maker)
        for name in files
        for maker in ("create_sliding_window_causal_mask", "create_masks_for_generate")
    )
    return None if makes_masks else window


def longest_causal_prompt(model: PreTrainedModel) -> int | None:
    """
    Tokens of the longest prompt that a model itself reads as chunks would; None for any length. Unlike
    `longest_in_chunks` this is found by a forward.
    """
    return 0 if looks_ahead(model) else window_left_out(model)


_longest: WeakKeyDictionary[PreTrainedModel, int | None] = WeakKeyDictionary()


def longest_in_chunks(model: PreTrainedModel) -> int | None:
    """
    Tokens of the longest prompt of which chunks surely compute the same as one forward; None for any length. Found
    once per model.
    """
    if model not in _longest:
        _longest[model] = 1 if bidirectional_layers(model) else window_left_out(model)
    return _longest[model]
