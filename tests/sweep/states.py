"""Which pairs have layers with recurrent or convolutional states, found in transformers' model files."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import transformers

from .building import tiny_config
from .registry import Pair
from .shrinking import parts_of


_STATES = re.compile(r"\b(update_conv_state|update_recurrent_state|causal_conv1d_fn|mamba\w*_scan|\w*delta_rule)\(")
"""What mixers call: of a cache that holds states, or for the arithmetic."""


@lru_cache
def state_files() -> dict[str, str]:
    """The texts of transformers' model files that call for states, by their folder."""
    paths = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    texts = {path.parent.name: path.read_text() for path in paths}
    return {name: text for name, text in texts.items() if _STATES.search(text)}


@lru_cache
def states_of(pair: Pair) -> frozenset[str]:
    """The folders in `state_files` from which a pair has configs: its own, or of a model that it wraps."""
    try:
        configs = [type(part) for part in parts_of(tiny_config(pair))]
    except Exception:  # cannot be built, as the sweep says
        configs = []
    kinds = [*configs, pair.config_class, pair.model_class]
    return frozenset(state_files()) & {kind.__module__.split(".")[-2] for kind in kinds}
