"""Whether a head fits a target, and what draft requests mean in its own vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, SuppressTokensLogitsProcessor

from ...models.structure import decoder_layers
from ..request import DraftRequest


def check_sizes(head: Any, target: PreTrainedModel) -> None:
    """
    Checks that a head was made for a target of such sizes.

    Raises:
        ValueError: if it was not.
    """
    config, text_config = head.config, target.config.get_text_config(decoder=True)
    name, its_name = type(head).__name__, type(target).__name__
    if config.vocab_size != text_config.vocab_size:
        raise ValueError(
            f"`assistant_model`: the {name} is for a vocabulary of {config.vocab_size} tokens, but the target "
            f"{its_name} has {text_config.vocab_size}. Use a head that was trained for this target."
        )
    target_size = config.target_hidden_size or config.hidden_size
    if target_size != text_config.hidden_size:
        raise ValueError(
            f"`assistant_model`: the {name} reads hidden states of size {target_size}, but those of the target "
            f"{its_name} have {text_config.hidden_size}. Use a head that was trained for this target."
        )
    if head.embed_tokens is None and config.hidden_size != text_config.hidden_size:
        raise ValueError(
            f"`assistant_model`: the {name} has hidden size {config.hidden_size} and no token embeddings, but the "
            f"target's are of size {text_config.hidden_size}. Use a checkpoint that holds `embed_tokens.weight`."
        )
    if head.lm_head is None and config.hidden_size != text_config.hidden_size:
        raise ValueError(
            f"`assistant_model`: the {name} has hidden size {config.hidden_size} and no lm_head, but the target's "
            f"reads hidden states of size {text_config.hidden_size}. Use a head that was trained for this target."
        )
    depth = getattr(config, "num_target_layers", None)
    if depth not in (None, text_config.num_hidden_layers):
        raise ValueError(
            f"`assistant_model`: the {name} was trained for a target of {depth} layers (`num_target_layers`), but "
            f"the target {its_name} has {text_config.num_hidden_layers}. Use a head that was trained for this "
            "target; if config.json is wrong, load it with num_target_layers=None."
        )
    if config.aux_boundaries(text_config.num_hidden_layers):
        decoder_layers(target)


def in_draft_vocabulary(request: DraftRequest, target_ids: torch.Tensor | None) -> DraftRequest:
    """The request for a head with the draft vocabulary `target_ids`: warpers name columns instead of tokens."""
    if target_ids is None:
        return request
    warpers = LogitsProcessorList()
    for warper in request.warpers:
        if isinstance(warper, SuppressTokensLogitsProcessor):
            columns = torch.isin(target_ids, warper.suppress_tokens.to(target_ids.device)).nonzero()[:, 0].tolist()
            if columns:
                warpers.append(SuppressTokensLogitsProcessor(columns, device=target_ids.device))
        else:
            warpers.append(warper)
    return replace(request, warpers=warpers)
