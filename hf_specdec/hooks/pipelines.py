"""Pipelines whose assistant is a drafter or head of ours."""

from __future__ import annotations

import functools
from os import PathLike
from typing import Any

from .calls import is_own, loaded


def let_pipelines_take_drafts() -> None:
    """
    Wraps the function by which a pipeline prepares its assistant, once. It compares the vocabularies and end tokens of
    two language models: heads and drafters have neither of their own, and draft in the target's tokens; so does a
    model whose vocabulary is only padded otherwise. Named language models are left to transformers, which loads their
    tokenizers too.
    """
    from transformers.pipelines import base

    original = base.load_assistant_model
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        if isinstance(assistant_model, str | PathLike):
            from ..generation.named_drafts import names_own_draft

            if names_own_draft(model, assistant_model):
                assistant_model = loaded(model, assistant_model)
        if isinstance(assistant_model, type) or is_own(assistant_model):
            from ..drafters import as_drafter

            as_drafter(assistant_model)
            return assistant_model, assistant_tokenizer
        if assistant_tokenizer is None and _needs_no_tokenizer(assistant_model, model):
            return assistant_model, None
        return original(model, assistant_model, assistant_tokenizer)

    base.load_assistant_model = load_assistant_model


def _needs_no_tokenizer(assistant_model: Any, model: Any) -> bool:
    from ..forwards.vocabulary import is_padded_otherwise

    return is_padded_otherwise(assistant_model, model)
