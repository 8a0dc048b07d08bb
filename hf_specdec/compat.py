"""
What differs between the supported releases of transformers: 5.17 to 5.24, and newer ones as far as they stay alike.

The rest of the library asks here and compares no versions itself.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from packaging import version
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.logits_process import SequenceBiasLogitsProcessor
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging


logger = logging.get_logger(__name__)

NEWEST_TRIED = (5, 24)
"""The newest minor release that the tests run with."""

_RELEASE = version.parse(transformers.__version__).release


def warn_if_untried() -> None:
    """Warns once per process if transformers is of a newer minor release than the tests run with."""
    if _RELEASE[:2] > NEWEST_TRIED:
        logger.warning_once(
            f"hf_specdec is tested with transformers 5.17 to {'.'.join(map(str, NEWEST_TRIED))}; this is "
            f"{transformers.__version__}. Most of it should work. If the text differs from plain `generate`, please "
            "report it."
        )


# --------------------------------------------------------------------------------------------------------------- names

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""
Names of the cache argument, newest first: transformers 5.24 renamed `past_key_values`, and `cache_params` of Mamba, to
`cache`.
"""

_prepares = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE: str = next(name for name in CACHE_NAMES if name in _prepares)
"""
Name of the cache in this release: among the keyword arguments that `generate` hands to a decoding method, in
`prepare_inputs_for_generation`, in the functions that make masks, in the layers of models, and in outputs.
"""


def cache_argument(parameters: set[str]) -> str | None:
    """
    The name by which a forward with these parameters takes its cache; None if it takes none. Models outside of
    transformers may have kept the older name.
    """
    return next((name for name in CACHE_NAMES if name in parameters), None)


def cache_name_of(model: Any) -> str:
    """The name under which `generate` hands its cache to this model, and to a decoding method."""
    kind = type(getattr(model, "_orig_mod", model))
    is_mamba = "mamba" in kind.__name__.lower()  # as `generate` decides it
    return "cache_params" if is_mamba and CACHE == "past_key_values" else CACHE


LENGTH_NAMES = frozenset({"cache_length", "past_key_values_length"})
"""Names by which a table of positions is told how many tokens came before; 5.24 has the shorter one."""


def cache_of(arguments: dict[str, Any]) -> Any:
    """The cache among the keyword arguments that `generate` hands to a decoding method; None if there is none."""
    return arguments.get(CACHE)


# --------------------------------------------------------------------------------------------------------------- masks

TREES_FROM = (5, 23)
NO_TREES: frozenset[str] = frozenset() if _RELEASE >= TREES_FROM else frozenset({"git", "mllama_text_model", "moshi"})
"""Model types whose attention takes neither the mask nor the context of a tree in this release."""


# -------------------------------------------------------------------------------------------------------------- caches

CHUNKS_BEHIND_A_CACHE = _RELEASE >= (5, 23)
"""Whether `generate` forwards a prompt in chunks correctly behind a cache that is filled already."""

NoCacheLayer: type = getattr(cache_utils, "DummyLayer", type("NoCacheLayer", (), {}))
"""The layer of a cache that stands for one without K/V; 5.17 has none."""

REUSABLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    NoCacheLayer,
)
"""Layers of a `DynamicCache` that can be continued."""

BLOCKS = "minimax_m3_sparse"
"""The kind of layers whose indexer selects blocks of keys, and of the cache layers that hold its keys."""
INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention", BLOCKS})
"""Kinds of layers whose indexer selects keys; "deepseek_…" is the name in transformers 5.17."""


def own_cache_layer(kind: str) -> type | None:
    """The class of cache layers that a model file has registered for a kind of layers; None for transformers' own."""
    found = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.get(kind)
    return found if found is not None and found.__module__ != cache_utils.__name__ else None


def index_keys_of(layer: Any) -> torch.Tensor | None:
    """Keys of an indexer that a layer of a `DynamicCache` holds, `[batch, heads, slots, dim]`; None without any."""
    if getattr(layer, "idx_keys", None) is not None:  # MiniMax-M3's own layer
        return layer.idx_keys
    keys = getattr(layer, "indexer_keys", None)
    return None if keys is None else keys[:, None]


def index_positions_of(layer: Any) -> torch.Tensor | None:
    """Positions that a layer of a `DynamicCache` holds for an indexer, `[3, batch, slots]`; None without any."""
    return getattr(layer, "indexer_position_ids", None)


def set_index_keys(layer: Any, index_keys: torch.Tensor) -> None:
    """Gives a layer of a `DynamicCache` the keys of an indexer, `[batch, heads, slots, dim]`."""
    if hasattr(layer, "idx_keys"):
        layer.idx_keys = index_keys
    else:
        layer.lazy_initialization_indexer(index_keys)
        layer.indexer_keys = index_keys[:, 0]


def is_reusable(layer: Any) -> bool:
    """Whether a layer of a user's cache can be continued."""
    is_of_blocks = getattr(layer, "_layer_type", None) == BLOCKS and isinstance(layer, DynamicLayer)
    return is_of_blocks or type(layer) in REUSABLE_LAYERS


def holds_index_keys(layer: Any) -> bool:
    """Whether a layer of a `DynamicCache` has a place for the keys of an indexer."""
    return hasattr(layer, "idx_keys") or hasattr(layer, "indexer_keys")


def block_size_of(config: Any) -> int:
    """Slots per block that a `ContinuousBatchingConfig` names: `block_size` in 5.17, `page_size` in newer releases."""
    size: int = config.page_size if getattr(config, "block_size", None) is None else config.block_size
    return size


# ---------------------------------------------------------------------------------------------------------- processors


@functools.cache
def biases_whole_texts() -> bool:
    """Whether `sequence_bias` applies to a text that is a sequence but for its last token, and nothing before it."""
    scores = torch.zeros(1, 2, device="cpu")
    found = SequenceBiasLogitsProcessor({(1, 1): 1.0})(torch.ones(1, 1, dtype=torch.long, device="cpu"), scores)
    return bool(found[0, 1])
