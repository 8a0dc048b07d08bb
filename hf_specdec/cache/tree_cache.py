"""`TreeCache`: preallocated K/V with a length per row, which keeps an accepted path of a tree in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from ..compat import index_keys_of, index_positions_of, set_index_keys
from ..states import LayerKinds, PendingPaths
from ..uploads import on_device
from .held_states import HoldsStates
from .kinds_of_layers import HybridLayer, NoLayer, new_layers, states_among
from .layers import SlotsOfRows, Span, TreeLayer, WriteWindow
from .state_layers import StateLayer


if TYPE_CHECKING:
    from ..graphs import GraphStore


class TreeCache(HoldsStates, Cache):
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
        kinds (`LayerKinds`, *optional*): what each layer caches, if some have states (`layer_kinds_of`).
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        device: torch.device,
        capacity: int,
        storage: GraphStore | None = None,
        kinds: LayerKinds | None = None,
    ):
        super().__init__(layers=new_layers(self, num_layers, kinds, lambda index: TreeLayer(self, index)))
        self.state_layers = states_among(self.layers)
        self.device, self.storage = device, storage
        self.capacity = capacity if storage is None else storage.capacity
        if storage is not None:
            for layer in self.state_layers:
                layer.kernel_pending = storage.pending_states(layer.index)
        self.write_window: WriteWindow | None = None
        self._has_memory = False
        self.set_lengths([0] * batch_size)

    context: Any = None
    """The `TreeContext` of the forward that runs, for layers that select keys; None outside of it."""
    position_shift: torch.Tensor
    """The `TreeForward.position_shift` of the last forward over a tree, `[…, batch]`."""
    is_paged = False
    """Whether K/V lie in blocks, found by `block_tables`."""
    counts_nodes = False
    """Whether the cache's length counts nodes before those of the forward, as a model does that takes no positions."""
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
            self._lengths_tensor = on_device(self.lengths, self.device)
        return self._lengths_tensor

    @contextmanager
    def behind(self, number: int) -> Iterator[None]:
        """A context for forwards in which every row has so many slots fewer, if it has as many."""
        lengths = self.lengths
        self.set_lengths([max(length - number, 0) for length in lengths])
        try:
            yield
        finally:
            self.set_lengths(lengths)

    def adopt_prefill(self) -> None:
        """Marks all slots that plain forwards have written as committed."""
        has_slots = any(isinstance(layer, CacheLayerMixin) and not isinstance(layer, NoLayer) for layer in self.layers)
        length = self.get_seq_length() if has_slots else self.state_layers[0].num_read
        self.set_lengths([length] * len(self.lengths))

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> int:
        """
        Makes the following forwards tree forwards that write `num_nodes` nodes from slot `lengths + offset` on.
        Returns one past the last slot of any row that they see.

        Args:
            offset (`int`): nodes that earlier forwards of the step have written.
            num_nodes (`int`): nodes that the next forward writes.
            in_place (`bool`, *optional*, defaults to `True`): whether layers read K/V in place instead of from a
                gathered copy; without effect here, where K/V are always read in place.
        """
        end = max(self.lengths) + offset + num_nodes
        if self.uniform_length is not None:
            self.write_window = Span(self.uniform_length + offset, end)
        else:
            nodes = torch.arange(offset, offset + num_nodes, device=self.device)
            self.write_window = SlotsOfRows(end, self.lengths_tensor[:, None] + nodes)
        return end

    def beside(self, encoder_cache: DynamicCache | None) -> Cache:
        """
        What a model is handed as its cache: this one, beside that of `encoder_hidden_states`, where there are any. The
        latter is filled by the first forward, and only read by later ones.
        """
        return self if encoder_cache is None else EncoderDecoderCache(self, encoder_cache)

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

    # ------------------------------------------------------------------------------------------------------- states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of committed slots of the longest row, after the prompt also of a cache without keys and values."""
        if self.state_layers and self.topology is not None:
            return max(self.lengths)
        return super().get_seq_length(layer_idx)

    def pending_paths(self) -> PendingPaths:
        if self._paths is None and self.storage is not None and not self.is_paged:
            self._paths = self.storage.paths(len(self.lengths), self.device)
        return super().pending_paths()

    def place_states(self, key: Any, states: torch.Tensor) -> torch.Tensor:
        if self.storage is None or self.is_paged:
            return states
        return self.storage.memory(key, [states.shape], (states,))[0].copy_(states)

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have states alone."""
        return [isinstance(layer, StateLayer) and not isinstance(layer, HybridLayer) for layer in self.layers]

    # -------------------------------------------------------------------------------------------------------- a step

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
        if self.state_layers:
            self._unsettled = kept
        self.set_lengths([length + len(nodes) for length, nodes in zip(self.lengths, kept, strict=True)])

    def wipe(self) -> None:
        """Zeroes the K/V in all slots after the committed ones: NaN there would reach later forwards."""
        for layer in self.layers:
            for row, length in enumerate(self.lengths if layer.is_initialized else ()):
                for states in layer.states:
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
        self.move_slots(sources, targets)

    def move_slots(self, *places: Any) -> None:
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
            if isinstance(layer, StateLayer):
                layer.load(source)
            if isinstance(layer, NoLayer) or getattr(source, "keys", None) is None or source.keys.numel() == 0:
                continue
            layer.lazy_initialization(source.keys, source.values)
            layer.reserve(length)
            held = source.keys.shape[2]
            layer.keys[:, :, length - held : length] = source.keys
            layer.values[:, :, length - held : length] = source.values
            index_keys = index_keys_of(source)
            if index_keys is not None:
                layer.hold_index(index_keys)
                layer.index_keys[:, :, length - held : length] = index_keys
                layer.indexed, layer.positions = length, index_positions_of(source)
            layer.filled, layer.first = length, length - held
        self.set_lengths([length] * len(self.lengths))

    def store(self, cache: Cache, length: int) -> None:
        """Copies the first `length` slots into a `DynamicCache`, as plain `generate` would have left it."""
        self.flush()
        if cache.layer_class_to_replicate is not None:
            while len(cache.layers) < sum(layer.is_initialized for layer in self.layers):
                cache.layers.append(cache.layer_class_to_replicate())
        for layer, target in zip(self.layers, cache.layers, strict=False):
            if isinstance(layer, StateLayer):
                layer.store(target)
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
            if layer.index_keys is not None:
                set_index_keys(target, layer.index_keys[:, :, :length].clone())
                if layer.positions is not None:
                    slots = torch.arange(length, device=layer.positions.device).expand(len(self.lengths), -1)
                    target.indexer_position_ids = layer.positions_of(slots)
