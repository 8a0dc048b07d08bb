"""Rotary embeddings that depend on how long a text is."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types that depend on the longest position of a forward, so that tree nodes change those of other tokens."""


def length_dependent_ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of a model's rotary embeddings of these types; `config` is that of its text."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [values for values in parameters.values() if isinstance(values, dict)]
    return [rope for rope in nested or [parameters] if rope.get("rope_type") in LENGTH_DEPENDENT]
