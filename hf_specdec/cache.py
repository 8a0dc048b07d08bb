"""`TreeCache`: preallocated K/V with a length per row, which keeps an accepted path of a tree in place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer


if TYPE_CHECKING:
    from .graphs import GraphStore


class TreeLayer(CacheLayerMixin):
    """
    K/V of one attention layer, `[batch, kv_heads, capacity, head_dim]`. All slots are kept, also of layers with a
    sliding window: what a query may see is decided by its mask.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, cache: TreeCache, index: int):
        super().__init__()
        self._index = index
        self._cache = weakref.ref(cache)  # no cycle: K/V are to go with the call, not with some later collection
        self.filled = 0
        """Slots written by plain forwards, all rows alike; not used while a tree forward writes."""

    @property
    def cache(self) -> TreeCache:
        """The cache that the layer is part of."""
        return self._cache()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity, storage = self.cache.capacity, self.cache.storage
        likes = key_states, value_states  # under autocast of two dtypes
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
        written: behind what is filled in a plain forward, at the slots that `TreeCache.write_nodes` named in a tree
        forward.
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
            # No `scatter_`: the compiler makes it a copy of the whole cache and back.
            rows, slots = window.places_on(self.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, num_slots: int) -> None:
        """Doubles the capacity until `num_slots` fit; from then on the memory is the cache's own."""
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
        """Keys (and the number of the first) that a plain forward of `query_length` tokens gets to see."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Committed slots (of the longest row)."""
        return self.filled if self.cache.write_window is None else max(self.cache.lengths)

    def get_max_length(self) -> int:
        """-1: the layer grows."""
        return -1


class WriteWindow:
    """
    Where a tree forward writes: `slots` (`[batch, nodes]`, int64), or from the one slot `start` on if that is the same
    for all rows; `end` is one past the last slot of any row.
    """

    def __init__(self, start: int | None, end: int, slots: torch.Tensor | None):
        self.start, self.end, self.slots = start, end, slots
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def places_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[batch, 1]` and slots `[batch, nodes]`, int64 on a device."""
        if device not in self._places:
            assert self.slots is not None
            rows = torch.arange(len(self.slots), device=device)[:, None]
            self._places[device] = rows, self.slots.to(device)
        return self._places[device]


class TreeCache(Cache):
    """
    The cache of a speculative call. Row b's committed tokens fill its first `lengths[b]` slots. A tree forward writes
    its nodes behind them, without moving `lengths`; `keep` then moves the accepted nodes down in place and the lengths
    up.

    Args:
        num_layers (`int`): decoder layers of the model.
        batch_size (`int`): rows.
        device (`torch.device`): where lengths and slot numbers live; K/V are where the model computes them.
        capacity (`int`): slots to allocate at first; more are allocated by doubling.
        storage (`GraphStore`, *optional*): where the K/V are, as long as its capacity does.
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
    """Whether `lengths_tensor` is there at no cost, or the device alone knows them."""
    is_on_device = False
    """Whether the device alone knows them."""
    block_tables: torch.Tensor | None = None
    """Of a cache in blocks, those of every row, `[batch, blocks]` int64."""

    @property
    def uniform_length(self) -> int | None:
        """The committed slots, if all rows have as many."""
        return self.lengths[0] if min(self.lengths) == max(self.lengths) else None

    def set_lengths(self, lengths: list[int]) -> None:
        """Says how many slots of every row hold committed tokens."""
        self.lengths = list(lengths)
        self._lengths_tensor: torch.Tensor | None = None

    @property
    def lengths_tensor(self) -> torch.Tensor:
        """The same as `[batch]` int64 on the device, made when somebody asks: mostly nobody does."""
        if self._lengths_tensor is None:
            self._lengths_tensor = torch.tensor(self.lengths, device=self.device)
        return self._lengths_tensor

    def adopt_prefill(self) -> None:
        """Counts what plain forwards have written as committed, for all rows alike."""
        self.set_lengths([self.get_seq_length()] * len(self.lengths))

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> None:
        """
        From now on forwards are tree forwards; the next write `num_nodes` nodes at `lengths + offset`.

        Args:
            in_place (`bool`, *optional*, defaults to `True`): whether layers attend to K/V where they lie; here they
                always can.
        """
        end = max(self.lengths) + offset + num_nodes
        if self.uniform_length is not None:
            self.write_window = WriteWindow(self.uniform_length + offset, end, None)
        else:
            nodes = torch.arange(offset, offset + num_nodes, device=self.device)
            self.write_window = WriteWindow(None, end, self.lengths_tensor[:, None] + nodes)

    def take_memory(self) -> None:
        """
        Takes what the storage holds for layers that have not written yet. A replayed forward writes there without
        them; they would clear it when they come to write.
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

    def _move(self, kept: list[list[int]]) -> None:
        if len(kept) == 1:
            start = self.lengths[0]
            sources: Any = [start + node for node in kept[0]]
            targets: Any = slice(start, start + len(sources))
        else:
            # Rows that keep fewer nodes copy what is already there; those slots are written again by the next step.
            most = max(map(len, kept))
            nodes = [row + list(range(len(row), most)) for row in kept]
            sources = self.lengths_tensor[:, None] + torch.tensor(nodes, device=self.device)
            targets = self.lengths_tensor[:, None] + torch.arange(most, device=self.device)
        self._move_slots(sources, targets)

    def _move_slots(self, *places: Any) -> None:
        """`move` of every layer; what is a tensor in `places` is copied once to every device of layers."""
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
            layer.filled = length
        self.set_lengths([length] * len(self.lengths))

    def store(self, cache: Cache, length: int) -> None:
        """Gives a `DynamicCache` the first `length` slots of this one, as plain `generate` would have left it."""
        if cache.layer_class_to_replicate is not None:
            while len(cache.layers) < sum(layer.is_initialized for layer in self.layers):
                cache.layers.append(cache.layer_class_to_replicate())
        for layer, target in zip(self.layers, cache.layers, strict=False):
            if not layer.is_initialized:
                continue
            start = 0
            if isinstance(target, DynamicSlidingWindowLayer):
                target.cumulative_length = length
                start = max(length - target.sliding_window + 1, 0)
            if not target.is_initialized:
                target.lazy_initialization(layer.keys, layer.values)
            target.keys = layer.keys[:, :, start:length].clone()
            target.values = layer.values[:, :, start:length].clone()


class LengthsOnDevice:
    """What caches have in common whose lengths only the device knows."""

    lengths_are_on_device = is_on_device = True

    @property
    def uniform_length(self) -> None:
        """The host knows of none."""
        return None

    def at(self, lengths: torch.Tensor) -> None:
        """Says where the following forwards write: behind these lengths, `[batch]` int64."""
        self._lengths_tensor = lengths


class DeviceCache(LengthsOnDevice, TreeCache):
    """
    The slots of another cache, whose lengths only the device knows: for steps that the host does not follow. It has
    all its slots already, and tree forwards alone use it.

    Args:
        source (`TreeCache`): after its prefill.
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
    Raises:
        ValueError: if a user's `past_key_values` has layers that cannot hold a tree.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"`past_key_values` of type {type(cache).__name__} has a {type(layer).__name__} at layer {index}, "
                "which cannot be used for speculation. Pass a `DynamicCache`, or none."
            )
    if not isinstance(cache, Cache) or not hasattr(cache, "layers") or getattr(cache, "offloading", False):
        raise ValueError(
            f"`past_key_values` of type {type(cache).__name__} cannot be used for speculation. Pass a `DynamicCache` "
            "without offloading, or none."
        )
