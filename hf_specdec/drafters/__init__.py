"""What proposes the draft tokens."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .base import Drafter, DraftRequest
from .draft_model import DraftModelDrafter
from .ngram import NgramDraft


__all__ = ["DraftModelDrafter", "DraftRequest", "Drafter", "NgramDraft", "as_drafter"]


def as_drafter(assistant: Any) -> Drafter:
    """
    The drafter for what a user passed as `assistant_model=`.

    Raises:
        TypeError: if it is neither a drafter nor a language model.
    """
    if isinstance(assistant, Drafter):
        return assistant
    if isinstance(assistant, PreTrainedModel) or isinstance(getattr(assistant, "base_model", None), PreTrainedModel):
        return DraftModelDrafter(assistant)
    raise TypeError(
        "`assistant_model` must be a causal language model or a drafter such as `NgramDraft()`, but is "
        f"{type(assistant).__name__}: {assistant!r}."
    )
