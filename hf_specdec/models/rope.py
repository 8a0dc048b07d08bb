"""Rotary embeddings by a model's config, and those that depend on the length of the text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types that depend on the largest position of a forward, so that tree nodes change other tokens' embeddings."""


def ropes_of(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Parameters of a model's rotary embeddings, from its text config: one for each type of layer, or one for all."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [values for values in parameters.values() if isinstance(values, dict)]
    return nested or [parameters]


def length_dependent_ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Parameters of a model's length-dependent rotary embeddings, from its text config."""
    return [rope for rope in ropes_of(config) if rope.get("rope_type") in LENGTH_DEPENDENT]
