"""Which calls are ours, by what they name as their assistant."""

from __future__ import annotations

import sys
from os import PathLike
from typing import Any


OPTIONS = ("assistant_model", "tree", "speculative_config")
"""Options of which each makes a call ours."""
PASSED_BY = "_hf_specdec_draft"
"""Keyword argument by which a draft reaches the `generate` of `GenerationMixin` past that of a model's class."""
MODULES_OF_DRAFTS = (
    "hf_specdec.drafters",
    "hf_specdec.block.modeling_block",
    "hf_specdec.eagle.modeling_eagle",
    "hf_specdec.gemma.modeling_gemma",
    "hf_specdec.medusa.modeling_medusa",
    "hf_specdec.mtp.modeling_mtp",
)
"""Modules of which one is imported wherever there is a drafter or head of hf_specdec."""


def is_speculative(generation_config: Any, assistant_model: Any) -> bool:
    """
    Whether hf_specdec serves a `generate` call: it names a tree or a `SpeculativeConfig`, or its assistant is a
    drafter or head of hf_specdec. So is one whose assistant is a class (or a name, where `generate` has not loaded
    it), to be refused with a remedy: transformers fails on it without one.
    """
    if generation_config.tree is not None or generation_config.speculative_config is not None:
        return True
    return isinstance(assistant_model, str | PathLike | type) or is_own(assistant_model)


def is_own(assistant_model: Any) -> bool:
    """Whether an assistant is a drafter or head of hf_specdec."""
    if assistant_model is None or not any(name in sys.modules for name in MODULES_OF_DRAFTS):
        return False
    from ..drafters import is_own_draft

    return is_own_draft(assistant_model)


def loaded(model: Any, assistant_model: Any) -> Any:
    """The draft of an assistant that is a name; any other is returned as it is."""
    if not isinstance(assistant_model, str | PathLike):
        return assistant_model
    from ..generation.named_drafts import named_draft

    return named_draft(model, assistant_model)
