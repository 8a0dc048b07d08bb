"""Indexers: the parts of attention layers that select keys, and how they run over a tree."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .modules import modules_of


_BY_ORDER = ("build_block_mask", "get_pooled_states")
"""Methods of indexers that pool keys in the order of their slots: of MiniMax-M3 and GLM-5-Next."""
_BY_MASK = ("token_budget",)
"""Attributes of indexers that pool the keys that the mask lets a query see: of Qwen4."""


def indexers_by_order(model: PreTrainedModel) -> list[Any]:
    """Indexers for which each node's keys must be put in the order of its own text."""
    return [module for module in _indexers_of(model) if _has_one(module, _BY_ORDER)]


def selects_blocks(indexer: Any) -> bool:
    """Whether an indexer returns blocks of keys; others return keys."""
    return hasattr(indexer, "build_block_mask")


def makes_masks_over_trees(model: PreTrainedModel) -> bool:
    """Whether all indexers of a model are known to select over a tree what they select along a text."""
    indexers = _indexers_of(model)
    return bool(indexers) and all(_has_one(module, _BY_ORDER + _BY_MASK) for module in indexers)


def _indexers_of(model: PreTrainedModel) -> list[nn.Module]:
    found = (vars(module).get("_modules", {}).get("indexer") for module in modules_of(model))
    return [module for module in found if module is not None]


def _has_one(module: nn.Module, names: tuple[str, ...]) -> bool:
    return any(hasattr(module, name) for name in names)
