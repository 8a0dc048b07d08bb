"""Starting weights: a head or draft model that is trained further."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..eagle import EagleHead
from ..models.structure import num_logits_of


_VERSIONS = {"eagle3": 3, "eagle1": 1}


def start_from(name: str, kind: str, target: PreTrainedModel) -> tuple[Any, torch.Tensor | None]:
    """
    Loads a head or a draft model to train further, for its own or a similar target.

    Args:
        name (`str`): Hub id or folder.
        kind (`str`): "eagle3", "eagle1" or "draft".
        target (`PreTrainedModel`): the target that the model will draft for.

    Returns:
        The model in float32 on the target's device, and the target's ids of its draft vocabulary, `[draft vocab]`
        int64; None if the draft vocabulary has all tokens.

    Raises:
        ValueError: if the model is of another kind, is for a target of other sizes, or has embeddings of its own.
    """
    vocab_size = num_logits_of(target)
    if kind == "draft":
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        _check("vocabulary", num_logits_of(model), vocab_size, name)
        return model.to(target.device), None
    head = EagleHead.from_pretrained(name, dtype=torch.float32)
    config = head.config
    if config.eagle_version != _VERSIONS[kind]:
        raise ValueError(
            f"`start_from`={name!r} is a head of EAGLE version {config.eagle_version}: use "
            f"`kind='eagle{3 if config.eagle_version == 3 else 1}'`."
        )
    _check("vocabulary", config.vocab_size, vocab_size, name)
    source = target.config.get_text_config(decoder=True)
    _check("hidden size", config.target_hidden_size or config.hidden_size, source.hidden_size, name)
    config.aux_boundaries(source.num_hidden_layers)  # raises for hidden states that the target does not have
    if head.embed_tokens is not None:
        raise ValueError(
            f"`start_from`={name!r} has token embeddings of its own, which training does not reach. Use a head that "
            "reads the target's."
        )
    head = head.to(target.device)
    return head, head.target_ids


def _check(what: str, found: int, wanted: int, name: str) -> None:
    if found != wanted:
        raise ValueError(
            f"`start_from`={name!r} has a {what} of {found}, the target one of {wanted}. Use one that was trained for "
            "such a target."
        )
