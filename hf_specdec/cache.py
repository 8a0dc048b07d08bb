"""`TreeCache`: preallocated K/V with a length per row, which keeps an accepted path of a tree in place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer


if TYPE_CHECKING:
    from .graphs import GraphStore


_REUSABLE = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
"""
Layers of a `DynamicCache` that can be continued. The `DummyLayer` of newer transformers stands for one without K/V.
"""


class TreeLayer(CacheLayerMixin):
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
        self._cache = weakref.ref(cache)  # no reference cycle: K/V must be freed with the call
        self.filled = 0
        """Number of slots written by plain forwards, equal in all rows; unused in tree forwards."""
        self.first = 0
        """The first slot that holds K/V: a sliding-window layer that was loaded had dropped those before."""

    @property
    def cache(self) -> TreeCache:
        """The cache that the layer is part of."""
        return self._cache()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity, storage = self.cache.capacity, self.cache.storage
        likes = key_states, value_states  # two dtypes under autocast
        shapes = [(*states.shape[:2], capacity, states.shape[3]) for states in likes]
        if storage is None:
            self.keys, self.values = map(torch.Tensor.new_zeros, likes, shapes)
        else:
            self.keys, self.values = storage.layer(self._index, shapes, likes)
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
        num_nodes = key_states.shape[2]
        window = self.cache.write_window
        if window is None:
            start, end = self.filled, self.filled + num_nodes
            self.filled = end
        else:
            start, end = window.start, window.end
        self.reserve(end)
        if start is not None:
            self.keys[:, :, start : start + num_nodes] = key_states
            self.values[:, :, start : start + num_nodes] = value_states
        else:
            # No `scatter_`: the compiler turns it into a copy of the whole cache and back.
            rows, slots = window.places_on(self.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, num_slots: int) -> None:
        """Grows the capacity to `num_slots`, at least doubling it, in memory of its own (not the storage's)."""
        if num_slots <= self.keys.shape[2]:
            return
        self.cache.storage = None
        self.cache.capacity = max(num_slots, self.cache.capacity, 2 * self.keys.shape[2])
        old = self.keys, self.values
        self.lazy_initialization(self.keys, self.values)
        for new, states in zip((self.keys, self.values), old, strict=True):
            new[:, :, : states.shape[2]] = states

    def move(self, sources: Any, targets: Any) -> None:
        """
        Copies slots `sources` to `targets`, in place: either a list and a slice for all rows, or two `[batch, slots]`
        int64 tensors on the layer's device.
        """
        for states in (self.keys, self.values):
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
        """Number of committed slots of the longest row."""
        return self.filled if self.cache.write_window is None else max(self.cache.lengths)

    def get_max_length(self) -> int:
        """-1: the layer grows."""
        return -1


class WriteWindow:
    """
    Slots that a tree forward writes to: `slots` (`[batch, nodes]`, int64), or the slots from `start` on if all rows
    write to equal slots; `end` is one past the last slot of any row.
    """

    def __init__(self, start: int | None, end: int, slots: torch.Tensor | None):
        self.start, self.end, self.slots = start, end, slots
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def places_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the written rows, `[batch, 1]`, and slots, `[batch, nodes]`, int64 on `device`."""
        if device not in self._places:
            assert self.slots is not None
            rows = torch.arange(len(self.slots), device=device)[:, None]
            self._places[device] = rows, self.slots.to(device)
        return self._places[device]


class TreeCache(Cache):
    """
    The cache of a speculative call. Row b's committed tokens fill its first `lengths[b]` slots. A tree forward writes
    its nodes after them, without moving `lengths`; `keep` then moves the accepted nodes down in place and the lengths
    up.

    Args:
        num_layers (`int`): decoder layers of the model.
        batch_size (`int`): rows.
        device (`torch.device`): where lengths and slot numbers live; K/V are where the model computes them.
        capacity (`int`): slots to allocate at first; more are allocated by doubling.
        storage (`GraphStore`, *optional*): memory over which CUDA graphs are captured; holds the K/V until a row
            outgrows its capacity.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        device: torch.device,
        capacity: int,
        storage: GraphStore | None = None,
    ):
        super().__init__(layers=[TreeLayer(self, index) for index in range(num_layers)])
        self.device, self.storage = device, storage
        self.capacity = capacity if storage is None else storage.capacity
        self.write_window: WriteWindow | None = None
        self._has_memory = False
        self.set_lengths([0] * batch_size)

    lengths_are_on_device = False
    """Whether `lengths_tensor` is on the device already, at no cost."""
    is_on_device = False
    """Whether only the device knows the lengths."""
    block_tables: torch.Tensor | None = None
    """Block table of every row of a paged cache, `[batch, blocks]` int64; None in other caches."""

    @property
    def uniform_length(self) -> int | None:
        """Number of committed slots, if it is equal in all rows; else None."""
        return self.lengths[0] if min(self.lengths) == max(self.lengths) else None

    def set_lengths(self, lengths: list[int]) -> None:
        """Sets the number of committed slots of every row."""
        self.lengths = list(lengths)
        self._lengths_tensor: torch.Tensor | None = None

    @property
    def lengths_tensor(self) -> torch.Tensor:
        """Number of committed slots of every row, `[batch]` int64 on the device; built on first use, seldom needed."""
        if self._lengths_tensor is None:
            self._lengths_tensor = torch.tensor(self.lengths, device=self.device)
        return self._lengths_tensor

    def adopt_prefill(self) -> None:
        """Marks all slots that plain forwards have written as committed."""
        self.set_lengths([self.get_seq_length()] * len(self.lengths))

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> None:
        """
        Makes the following forwards tree forwards that write `num_nodes` nodes from slot `lengths + offset` on.

        Args:
            offset (`int`): nodes that earlier forwards of the step have written.
            num_nodes (`int`): nodes that the next forward writes.
            in_place (`bool`, *optional*, defaults to `True`): whether layers read K/V in place instead of from a
                gathered copy; without effect here, where K/V are always read in place.
        """
        end = max(self.lengths) + offset + num_nodes
        if self.uniform_length is not None:
            self.write_window = WriteWindow(self.uniform_length + offset, end, None)
        else:
            nodes = torch.arange(offset, offset + num_nodes, device=self.device)
            self.write_window = WriteWindow(None, end, self.lengths_tensor[:, None] + nodes)

    def take_memory(self) -> None:
        """
        Initializes layers that have not written yet with their memory in the storage. A replayed CUDA graph writes to
        that memory without calling the layers, which would zero it at their first write.
        """
        if self._has_memory or self.storage is None:
            return
        for index, layer in enumerate(self.layers):
            held = self.storage.held(index)
            if held is not None and not layer.is_initialized:
                layer.lazy_initialization(*held)
        self._has_memory = True

    def keep(self, paths: list[list[int] | None]) -> None:
        """
        Commits the root and an accepted path for every row.

        Args:
            paths (`list`): for every row, the accepted nodes from the root's child down (`list[int]`); a row with None
                keeps nothing, not even the root.
        """
        kept = [[0, *path] if path is not None else [] for path in paths]
        if any(nodes != list(range(len(nodes))) for nodes in kept):
            self._move(kept)
        self.set_lengths([length + len(nodes) for length, nodes in zip(self.lengths, kept, strict=True)])

    def wipe(self) -> None:
        """Zeroes the K/V in all slots behind the committed ones: NaN there would reach later forwards."""
        for layer in self.layers:
            for row, length in enumerate(self.lengths if layer.is_initialized else ()):
                for states in (layer.keys, layer.values):
                    states[row, :, length:] = 0.0

    def _move(self, kept: list[list[int]]) -> None:
        if len(kept) == 1:
            start = self.lengths[0]
            sources: Any = [start + node for node in kept[0]]
            targets: Any = slice(start, start + len(sources))
        else:
            # Rows that keep fewer nodes copy surplus slots onto themselves; the next step overwrites these.
            most = max(map(len, kept))
            nodes = [row + list(range(len(row), most)) for row in kept]
            sources = self.lengths_tensor[:, None] + torch.tensor(nodes, device=self.device)
            targets = self.lengths_tensor[:, None] + torch.arange(most, device=self.device)
        self._move_slots(sources, targets)

    def _move_slots(self, *places: Any) -> None:
        """Calls `move` of every layer; tensors in `places` are copied once to every device that has layers."""
        of_device: dict[torch.device, list[Any]] = {}
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            if layer.device not in of_device:
                of_device[layer.device] = [
                    place.to(layer.device) if isinstance(place, torch.Tensor) else place for place in places
                ]
            layer.move(*of_device[layer.device])

    # ---------------------------------------------------------------------------- from and to transformers' own caches

    def load(self, cache: Cache) -> None:
        """
        Copies the K/V of a `DynamicCache` into this (empty) cache. Slots that a sliding-window layer has dropped stay
        empty: they are outside the window of every later query.
        """
        length = cache.get_seq_length()
        for layer, source in zip(self.layers, cache.layers, strict=False):
            if source.keys is None or source.keys.numel() == 0:
                continue
            layer.lazy_initialization(source.keys, source.values)
            layer.reserve(length)
            held = source.keys.shape[2]
            layer.keys[:, :, length - held : length] = source.keys
            layer.values[:, :, length - held : length] = source.values
            layer.filled, layer.first = length, length - held
        self.set_lengths([length] * len(self.lengths))

    def store(self, cache: Cache, length: int) -> None:
        """Copies the first `length` slots into a `DynamicCache`, as plain `generate` would have left it."""
        if cache.layer_class_to_replicate is not None:
            while len(cache.layers) < sum(layer.is_initialized for layer in self.layers):
                cache.layers.append(cache.layer_class_to_replicate())
        for layer, target in zip(self.layers, cache.layers, strict=False):
            if not layer.is_initialized:
                continue
            start = 0
            if isinstance(target, DynamicSlidingWindowLayer):
                target.cumulative_length = length
                # A layer that records its past drops none of it before it is cropped.
                start = layer.first if target.record_past else max(length - target.sliding_window + 1, 0)
            if not target.is_initialized:
                target.lazy_initialization(layer.keys, layer.values)
            target.keys = layer.keys[:, :, start:length].clone()
            target.values = layer.values[:, :, start:length].clone()


class LengthsOnDevice:
    """Mixin of caches whose lengths only the device knows."""

    lengths_are_on_device = is_on_device = True

    @property
    def uniform_length(self) -> None:
        """None: the host does not know the lengths."""
        return None

    def at(self, lengths: torch.Tensor) -> None:
        """Sets the number of committed slots of every row, `[batch]` int64, for the following forwards."""
        self._lengths_tensor = lengths


class DeviceCache(LengthsOnDevice, TreeCache):
    """
    The K/V memory of another cache, with lengths that only the device knows: for steps that run without the host. All
    slots are allocated already, and only tree forwards use this cache.

    Args:
        source (`TreeCache`): the cache that owns the K/V, after its prefill.
    """

    def __init__(self, source: TreeCache):
        super().__init__(len(source.layers), len(source.lengths), source.device, source.capacity)
        for layer, held in zip(self.layers, source.layers, strict=True):
            layer.keys, layer.values, layer.is_initialized = held.keys, held.values, held.is_initialized
            if held.is_initialized:
                layer.dtype, layer.device = held.dtype, held.device

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> None:
        nodes = torch.arange(offset, offset + num_nodes, device=self.device)
        self.write_window = WriteWindow(None, self.capacity, self.lengths_tensor[:, None] + nodes)


def check_reusable(cache: Cache) -> None:
    """
    Checks that a user's `past_key_values` can be continued by a `TreeCache`.

    Raises:
        ValueError: if a user's `past_key_values` has layers that cannot hold a tree.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) not in _REUSABLE:
            raise ValueError(
                f"`past_key_values` of type {type(cache).__name__} has a {type(layer).__name__} at layer {index}, "
                "which cannot be used for speculation. Pass a `DynamicCache`, or none."
            )
    if not isinstance(cache, Cache) or not hasattr(cache, "layers") or getattr(cache, "offloading", False):
        raise ValueError(
            f"`past_key_values` of type {type(cache).__name__} cannot be used for speculation. Pass a `DynamicCache` "
            "without offloading, or none."
        )
