"""Rotary embeddings that depend on the length of the text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types that depend on the largest position of a forward, so that tree nodes change other tokens' embeddings."""


def length_dependent_ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Parameters of a model's length-dependent rotary embeddings, from its text config."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [values for values in parameters.values() if isinstance(values, dict)]
    return [rope for rope in nested or [parameters] if rope.get("rope_type") in LENGTH_DEPENDENT]
