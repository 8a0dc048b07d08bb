"""Indexers that pool keys: over a tree each node's keys are put in the order of its own text first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import TreeCache
from ..models.indexers import indexers_by_order, selects_blocks
from ..models.node_rows import NodeRows


MOST_ELEMENTS = 1 << 26
"""Elements of the keys that are copied at a time."""


@contextmanager
def selecting_along_paths(model: PreTrainedModel) -> Iterator[None]:
    """A context in which indexers that pool keys (MiniMax-M3, GLM-5-Next) do so for each node by its own text."""
    hooks = [
        indexer.register_forward_hook(_select_along_paths, with_kwargs=True) for indexer in indexers_by_order(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _select_along_paths(
    indexer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], selected: torch.Tensor
) -> torch.Tensor | None:
    """
    A forward hook: what the indexer selects for the nodes of a tree, in the shape of what its own forward `selected`.
    It runs once more, with every node as a row of its own. None, where its own forward was right.
    """
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if not isinstance(cache, TreeCache) or cache.context is None:
        return None
    is_of_blocks = selects_blocks(indexer)
    if is_of_blocks and cache.context.nodes_are_in_order:
        return None
    keys, slots = cache.layers[indexer.layer_idx].read_index()[:, 0], cache.context.slots_of_paths.to(selected.device)
    ends = cache.context.query_slots.to(selected.device)
    batch, queries, num_slots = slots.shape
    at_once = max(1, MOST_ELEMENTS // (batch * num_slots * keys.shape[2]))
    found = []
    for nodes in torch.arange(queries, device=keys.device).split(at_once):
        part = slice(int(nodes[0]), int(nodes[-1]) + 1)
        of_part = slots[:, part].clamp(max=keys.shape[1] - 1)
        gathered = keys.gather(1, of_part.flatten(1)[..., None].expand(-1, -1, keys.shape[2]))
        gathered = gathered.view(-1, num_slots, keys.shape[2])
        is_later = torch.arange(num_slots, device=keys.device) > ends[:, part].flatten()[:, None]
        held = _Given(indexer.layer_idx, gathered.masked_fill(is_later[..., None], 0))
        all_rows = torch.arange(batch, device=keys.device)
        rows = NodeRows((batch, queries), all_rows.repeat_interleave(len(nodes)), nodes.repeat(batch))
        own = {name: rows.of(value, held) for name, value in kwargs.items()}
        # [nodes, 1, selected], or with heads before the 1
        places = indexer.forward(*(rows.of(value, held) for value in args), **own)
        places = places.squeeze(-2).unflatten(0, (batch, -1))
        found.append(places.transpose(1, 2) if is_of_blocks else _slots_at(of_part, places))
    return torch.cat(found, dim=-2)


def _slots_at(slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The slots at `places` of the nodes' own texts; -1 stays."""
    at = slots.gather(2, places.clamp(min=0).long()).to(places.dtype)
    return torch.where(places < 0, places, at)


class _Given:
    """
    Stands for a cache, and for its layer `index`, that holds the keys of an indexer already, `[rows, slots, dim]`, the
    token of every row included.
    """

    get_seq_length: Callable[[], int]

    def __init__(self, index: int, keys: torch.Tensor):
        self.layers, self.keys = {index: self}, keys
        self.get_seq_length = lambda: keys.shape[1]

    def update_indexer(self, new: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """All keys, `[rows, slots, dim]`."""
        return self.keys

    def update_index(self, new: torch.Tensor) -> torch.Tensor:
        """All keys, `[rows, 1, slots, dim]`."""
        return self.keys[:, None]
