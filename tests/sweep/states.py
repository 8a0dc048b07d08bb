"""Which pairs have layers with recurrent or convolutional states, found in transformers' model files."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import transformers

from .building import tiny_config
from .registry import Pair, all_pairs
from .shrinking import parts_of


_STATES = re.compile(r"\b(update_conv_state|update_recurrent_state|causal_conv1d_fn|mamba\w*_scan|\w*delta_rule)\(")
"""What mixers call: of a cache that holds states, or for the arithmetic."""
_OWN_STATES = re.compile(r"_is_stateful = True|^class \w*Cache\w*\(\w*(Cache|Layer)\):", re.M)
"""What the files of other models say that keep more than keys and values."""


@lru_cache
def _texts() -> dict[str, str]:
    """The texts of transformers' model files, by their folder."""
    paths = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    return {path.parent.name: path.read_text() for path in sorted(paths)}


@lru_cache
def state_files() -> dict[str, str]:
    """The texts of transformers' model files that call for states, by their folder."""
    return {name: text for name, text in _texts().items() if _STATES.search(text)}


@lru_cache
def pairs_to_serve() -> list[Pair]:
    """For each model file that calls for states, wraps a model with them, or has caches of its own: its first pair."""
    texts = [text for text in _texts().values() if _STATES.search(text) or _OWN_STATES.search(text)]
    found = (next((pair for pair in all_pairs() if f"\nclass {pair.class_name}(" in text), None) for text in texts)
    return [pair for pair in found if pair is not None]


@lru_cache
def states_of(pair: Pair) -> frozenset[str]:
    """The folders in `state_files` from which a pair has configs: its own, or of a model that it wraps."""
    try:
        configs = [type(part) for part in parts_of(tiny_config(pair))]
    except Exception:  # cannot be built, as the sweep says
        configs = []
    kinds = [*configs, pair.config_class, pair.model_class]
    return frozenset(state_files()) & {kind.__module__.split(".")[-2] for kind in kinds}
