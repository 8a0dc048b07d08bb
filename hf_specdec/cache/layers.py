"""The K/V of one attention layer, and the slots that a forward over a tree writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .index_keys import HoldsIndexKeys


if TYPE_CHECKING:
    from .tree_cache import TreeCache


class TreeLayer(HoldsIndexKeys["TreeCache"], CacheLayerMixin):
    """
    K/V of one attention layer, `[batch, kv_heads, capacity, head_dim]`. Sliding-window layers keep all slots, too: the
    mask decides what a query attends to.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, cache: TreeCache, index: int):
        super().__init__()
        self._index = index
        self.join(cache)
        self.filled = 0
        """Number of slots written by plain forwards, equal in all rows; unused in tree forwards."""
        self.indexed = 0
        """Number of slots to which they have written the keys of an indexer: before their K/V, or after."""
        self.first = 0
        """The first slot that holds K/V: a sliding-window layer that was loaded had dropped those before."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity, storage = self.cache.capacity, self.cache.storage
        likes = key_states, value_states  # two dtypes under autocast
        shapes = [(*states.shape[:2], capacity, states.shape[3]) for states in likes]
        if storage is None:
            self.keys, self.values = map(torch.Tensor.new_zeros, likes, shapes)
        else:
            self.keys, self.values = storage.memory(self._index, shapes, likes)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes new K/V (`[batch, kv_heads, nodes, head_dim]`) and returns views of all slots up to the last one
        written. Plain forwards append to the filled slots; tree forwards write to the slots that
        `TreeCache.write_nodes` set.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.cache.write_window
        if window is None:
            window = Span(self.filled, self.filled + key_states.shape[2])
            self.filled = window.end
        self.reserve(window.end)
        if isinstance(window, Span):
            self.keys[:, :, window.start : window.end] = key_states
            self.values[:, :, window.start : window.end] = value_states
        else:
            # No `scatter_`: the compiler turns it into a copy of the whole cache and back.
            rows, slots = window.places_on(self.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : window.end], self.values[:, :, : window.end]

    def read(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V of slots from `first` to before `end`, `[batch, kv_heads, slots, head_dim]` each."""
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def update_index(self, index_keys: torch.Tensor) -> torch.Tensor:
        window = self.cache.write_window
        if window is None:
            window = Span(self.indexed, self.indexed + index_keys.shape[2])
            self.indexed = window.end
        held = self.hold_index(index_keys, window.end)
        if isinstance(window, Span):
            held[:, :, window.start : window.end] = index_keys
        else:
            rows, slots = window.places_on(index_keys.device)
            held[rows, :, slots] = index_keys.transpose(1, 2)
        return held[:, :, : window.end]

    def read_index(self) -> torch.Tensor:
        window = self.cache.write_window
        return self.held_index()[:, :, : self.indexed if window is None else window.end]

    def hold_index(self, like: torch.Tensor, num_slots: int = 0) -> torch.Tensor:
        """
        Takes memory for an indexer's keys, `[batch, heads, nodes, dim]` like these, of so many slots at least, and
        returns it.
        """
        old = self.index_keys
        if old is not None and num_slots <= old.shape[2]:
            return old
        capacity = max(self.keys.shape[2] if self.is_initialized else self.cache.capacity, num_slots)
        self.index_keys = held = like.new_zeros(*like.shape[:2], capacity, like.shape[3])
        if old is not None:
            held[:, :, : old.shape[2]] = old
        return held

    def reserve(self, num_slots: int) -> None:
        """Grows the capacity to `num_slots`, at least doubling it, in memory of its own (not the storage's)."""
        if num_slots <= self.keys.shape[2]:
            return
        self.cache.storage = None
        self.cache.capacity = max(num_slots, self.cache.capacity, 2 * self.keys.shape[2])
        old = self.keys, self.values
        self.lazy_initialization(*old)
        for new, states in zip((self.keys, self.values), old, strict=True):
            new[:, :, : states.shape[2]] = states
        if self.index_keys is not None:
            self.hold_index(self.index_keys, num_slots)

    def move(self, sources: Any, targets: Any) -> None:
        """
        Copies slots `sources` to `targets`, in place: either a list and a slice for all rows, or two `[batch, slots]`
        int64 tensors on the layer's device.
        """
        for states in self.states:
            if isinstance(targets, slice):
                states[:, :, targets] = states[:, :, sources]
                continue
            shape = (-1, states.shape[1], -1, states.shape[3])
            moved = states.gather(2, sources[:, None, :, None].expand(shape))
            states.scatter_(2, targets[:, None, :, None].expand(shape), moved)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a plain forward of `query_length` tokens sees, and the index of the first key (0)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Number of committed slots of the longest row; of all slots before the nodes, if `TreeCache.counts_nodes`."""
        window = self.cache.write_window
        if window is None:
            return self.filled
        return window.start if self.cache.counts_nodes and isinstance(window, Span) else max(self.cache.lengths)

    def get_max_length(self) -> int:
        """-1: the layer grows."""
        return -1


class Span:
    """Slots from `start` to before `end`, to which all rows of a forward write."""

    def __init__(self, start: int, end: int):
        self.start, self.end = start, end


class SlotsOfRows:
    """
    Slots of its own to which every row of a tree forward writes, `slots` (`[batch, nodes]`, int64); `end` is one past
    the last slot of any row.
    """

    def __init__(self, end: int, slots: torch.Tensor):
        self.end, self.slots = end, slots
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def places_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the written rows, `[batch, 1]`, and slots, `[batch, nodes]`, int64 on `device`."""
        if device not in self._places:
            rows = torch.arange(len(self.slots), device=device)[:, None]
            self._places[device] = rows, self.slots.to(device)
        return self._places[device]


WriteWindow = Span | SlotsOfRows
"""Slots that a tree forward writes to."""
