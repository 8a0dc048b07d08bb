"""Indexers that select blocks of slots: over a tree each node's keys are put in the order of its own text first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache import TreeCache
from ..compat import BLOCKS
from ..models.modules import modules_of


MOST_ELEMENTS = 1 << 26
"""Elements of the keys that are copied at a time."""


@contextmanager
def selecting_along_paths(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the indexers of MiniMax-M3 select for each node by the order of its own text."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    indexers = [module for module in modules_of(model) if hasattr(module, "build_block_mask")]
    hooks = [indexer.register_forward_hook(_select_along_paths) for indexer in indexers if BLOCKS in kinds]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _select_along_paths(indexer: Any, args: tuple[Any, ...], selected: torch.Tensor) -> torch.Tensor | None:
    """
    A forward hook: what the indexer selects for the nodes of a tree, `[batch, heads, queries, selected]` int64. It
    runs once more, with every node as a row of its own. None, where its own forward was right.
    """
    states, (cos, sin), cache, positions = args
    if not isinstance(cache, TreeCache) or cache.context is None or cache.context.slots_of_paths is None:
        return None
    keys, slots = cache.layers[indexer.layer_idx].read_index()[:, 0], cache.context.slots_of_paths
    batch, queries, num_slots = slots.shape
    at_once = max(1, MOST_ELEMENTS // (batch * num_slots * keys.shape[2]))
    cos, sin = (part.expand(batch, -1, -1) for part in (cos, sin))
    found = []
    for first in range(0, queries, at_once):
        part = slice(first, first + at_once)
        of_part = slots[:, part].to(keys.device).clamp(max=keys.shape[1] - 1)
        gathered = keys.gather(1, of_part.flatten(1)[..., None].expand(-1, -1, keys.shape[2]))
        rows = _Given(indexer.layer_idx, gathered.view(-1, 1, num_slots, keys.shape[2]))
        own = (values[:, part].flatten(0, 1)[:, None] for values in (states, cos, sin, positions))
        of_states, *of_rope, of_positions = own
        blocks = indexer.forward(of_states, tuple(of_rope), rows, of_positions)[:, :, 0]
        found.append(blocks.view(batch, -1, *blocks.shape[1:]).transpose(1, 2))
    return torch.cat(found, dim=2)


class _Given:
    """Stands for a cache whose layer `index` holds these keys of an indexer, `[rows, 1, slots, dim]`, already."""

    def __init__(self, index: int, keys: torch.Tensor):
        self.layers = {index: SimpleNamespace(update_index=lambda new: keys)}
