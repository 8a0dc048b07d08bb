"""`grammar=` and `grammar_after=` among the options of a `generate` call or of a request."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .beginnings import FreeBeginning
from .compiled import CompiledGrammar
from .mask import GrammarMask


def grammar_mask(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> GrammarMask:
    """
    The mask of the `grammar` among the options of `generate`.

    Raises:
        ValueError, TypeError: for a grammar that cannot be compiled, or without a `tokenizer`.
        ImportError: without `llguidance`.
    """
    tokenizer = options.get("tokenizer")
    if tokenizer is None:
        raise ValueError("`grammar` without a `tokenizer`: it speaks of text. Pass `tokenizer=`, the target's.")
    size = model.config.get_text_config(decoder=True).vocab_size
    ends = _end_tokens(model, generation_config, options)
    beginning = FreeBeginning.of(options.get("grammar_after"))
    return GrammarMask(CompiledGrammar(options["grammar"], tokenizer, size, ends, beginning))


def with_grammar(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The options with the mask of their `grammar`, if they have one, behind the other `logits_processor`s."""
    options = dict(options)
    if options.get("grammar") is not None:
        mask = grammar_mask(model, generation_config, options)
        options["logits_processor"] = LogitsProcessorList([*(options.get("logits_processor") or ()), mask])
    elif options.get("grammar_after") is not None:
        raise ValueError("`grammar_after` without a `grammar`, which begins there. Give one, or leave this out.")
    for name in ("grammar", "grammar_after"):
        options.pop(name, None)
    return options


def _end_tokens(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> list[int]:
    """The tokens that end the texts of a call, as `generate` finds them; none if it names none."""
    for config in (generation_config, model.generation_config):
        if "eos_token_id" in options:
            break
        if config is not None and config.eos_token_id is not None:
            options = {"eos_token_id": config.eos_token_id}
    ends = options.get("eos_token_id")
    found = [] if ends is None else torch.as_tensor(ends, device="cpu").flatten().tolist()
    return [end for end in found if end >= 0]
