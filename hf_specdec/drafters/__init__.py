"""What proposes the draft tokens."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..eagle import EagleHead
from ..medusa import MedusaHeads
from .base import Drafter, DraftRequest
from .draft_model import DraftModelDrafter
from .eagle import EagleDrafter
from .medusa import MedusaDrafter
from .ngram import NgramDraft


__all__ = ["DraftModelDrafter", "EagleDrafter", "DraftRequest", "Drafter", "NgramDraft", "as_drafter", "is_own_draft"]


def is_own_draft(assistant: Any) -> bool:
    """Whether what a user passed as `assistant_model=` is of a kind that transformers itself does not know."""
    return isinstance(assistant, Drafter | EagleHead | MedusaHeads)


def as_drafter(assistant: Any) -> Drafter:
    """
    The drafter for what a user passed as `assistant_model=`.

    Raises:
        TypeError: if it is neither a drafter nor a head nor a language model.
        ValueError: for a model tuned with a learned prompt.
    """
    if isinstance(assistant, Drafter):
        return assistant
    if isinstance(assistant, EagleHead):
        return EagleDrafter(assistant)
    if isinstance(assistant, MedusaHeads):
        return MedusaDrafter(assistant)
    peft_config = getattr(assistant, "active_peft_config", None)
    if peft_config is not None:
        if peft_config.is_prompt_learning:
            raise ValueError(
                f"`assistant_model`: the draft is tuned with {peft_config.peft_type} (a learned prompt), which cannot "
                "fill a tree. Use a LoRA-like adapter, or the model without its prompt."
            )
        assistant = assistant.get_base_model()  # the adapter's layers are inside
    if isinstance(assistant, PreTrainedModel) or isinstance(getattr(assistant, "base_model", None), PreTrainedModel):
        return DraftModelDrafter(assistant)
    raise TypeError(
        "`assistant_model` must be a causal language model, an `EagleHead`, or a drafter such as `NgramDraft()`, but "
        f"is {type(assistant).__name__}: {assistant!r}."
    )
