"""`PagedLayer`: the K/V of one attention layer in blocks, and `PagedWindow`, the slots that a forward writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..uploads import on_device
from .blocks import NUM_RESERVED
from .index_keys import HoldsIndexKeys
from .state_layers import StateLayer


if TYPE_CHECKING:
    from .paged_cache import PagedCache


class PagedWindow:
    """
    The slots that a forward writes and the blocks that it reads.

    Args:
        blocks, offsets (`torch.Tensor` of shape `[batch, nodes]`, int64): block number, and offset in the block, of
            each node.
        tables (`torch.Tensor` of shape `[batch, blocks]`, int64): block tables of the rows to read.
        end (`int`): one past the last slot of any row.
        block_size (`int`): slots per block.
        in_place (`bool`, *optional*, defaults to `False`): whether attention reads K/V by the block tables, without a
            copy.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        tables: torch.Tensor,
        end: int,
        block_size: int,
        in_place: bool = False,
    ):
        self.blocks, self.offsets, self.tables = blocks, offsets, tables
        self.end, self.block_size, self.in_place = end, block_size, in_place
        self._slots: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._rows: dict[tuple[int, torch.device], torch.Tensor] = {}

    def slots_to_write(self, num_heads: int, device: torch.device) -> torch.Tensor:
        """Indices into a layer's `[blocks · heads · block_size]` slots, in the order of batch, head and node."""
        key = (num_heads, device)
        if key not in self._slots:
            heads = torch.arange(num_heads, device=self.blocks.device)[None, :, None]
            slots = (self.blocks[:, None] * num_heads + heads) * self.block_size + self.offsets[:, None]
            self._slots[key] = slots.flatten().to(device)
        return self._slots[key]

    def rows_to_read(self, num_heads: int, device: torch.device) -> torch.Tensor:
        """Indices into a layer's `[blocks · heads]` rows, in the order of batch, head and block."""
        key = (num_heads, device)
        if key not in self._rows:
            heads = torch.arange(num_heads, device=self.tables.device)
            rows = self.tables[:, None, :] * num_heads + heads[None, :, None]
            self._rows[key] = rows.flatten().to(device)
        return self._rows[key]


class PagedLayer(HoldsIndexKeys["PagedCache"], CacheLayerMixin):
    """K/V of one attention layer, `[blocks, kv_heads, block_size, head_dim]`."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, cache: PagedCache):
        super().__init__()
        self.join(cache)

    @property
    def window(self) -> PagedWindow:
        """The slots that the present forward writes and reads."""
        window = self.cache.write_window
        if window is None:
            raise RuntimeError("`PagedCache.write_nodes` must say where a forward writes, before it runs.")
        return window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pool = self.cache.pool
        # Not zeroed as a whole: memory is taken when it is written, block by block.
        keys, values = (
            states.new_empty(pool.num_blocks + NUM_RESERVED, states.shape[1], pool.block_size, states.shape[3])
            for states in (key_states, value_states)
        )
        self.hold(keys, values)
        self._zero_reserved([keys, values])

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes these tensors, `[blocks, kv_heads, block_size, head_dim]` each, the layer's memory."""
        self.keys, self.values, self.dtype, self.device = keys, values, keys.dtype, keys.device
        # Two views of the memory: `_slots` for writes, `_blocks` for reads.
        self._slots = [states.flatten(0, 2) for states in (keys, values)]
        self._blocks = [states.flatten(0, 1).flatten(1) for states in (keys, values)]
        self.is_initialized = True

    @property
    def has_memory(self) -> bool:
        """Whether the layer has allocated its memory."""
        return self.is_initialized

    def view_for(self, cache: PagedCache) -> PagedLayer:
        """A layer of another cache over the same memory."""
        view = PagedLayer(cache)
        if self.is_initialized:
            view.hold(self.keys, self.values)
        return view

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes new K/V (`[batch, kv_heads, nodes, head_dim]`) into the slots set by `PagedCache.write_nodes`. Returns
        all blocks without a copy if attention reads block tables; otherwise copies of all slots up to the last one
        written, `[batch, kv_heads, slots, head_dim]`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_heads, window = key_states.shape[1], self.window
        if window.in_place:  # may be compiled: uses no other views of the memory
            write_kv = _writer()
            write_kv(self.keys, self.values, key_states, value_states, window.blocks, window.offsets)
            return self.keys, self.values
        index = window.slots_to_write(num_heads, self.device)
        for slots, states in zip(self._slots, (key_states, value_states), strict=True):
            slots.index_copy_(0, index, states.flatten(0, 2))
        return self.gather(self._blocks[0], num_heads), self.gather(self._blocks[1], num_heads)

    def read(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the rows' K/V of slots from `first` to before `end`, `[batch, kv_heads, slots, head_dim]`."""
        tables = self.cache.tables_from(first, end).to(self.device)
        start = first % self.cache.pool.block_size
        keys, values = (states[tables].transpose(1, 2).flatten(2, 3) for states in (self.keys, self.values))
        return keys[:, :, start : start + end - first], values[:, :, start : start + end - first]

    def update_index(self, index_keys: torch.Tensor) -> torch.Tensor:
        index = self.window.slots_to_write(index_keys.shape[1], index_keys.device)
        self.hold_index(index_keys).flatten(0, 2).index_copy_(0, index, index_keys.flatten(0, 2))
        return self.read_index()

    def positions_of(self, slots: torch.Tensor) -> torch.Tensor:
        positions, known = super().positions_of(slots), self.cache.prompt_positions
        positions = positions.clone() if known else positions  # may be one row for all
        for row, table in enumerate(self.cache.tables if known else ()):
            own = known.get(table)
            if own is not None:
                positions[:, row, : own.shape[1]] = own
        return positions

    def read_index(self) -> torch.Tensor:
        held = self.held_index()
        return self.gather(held.flatten(0, 1).flatten(1), held.shape[1])

    def hold_index(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for an indexer's keys, `[batch, heads, nodes, dim]` like these, taken if there is none yet."""
        held = self.index_keys
        if held is None:
            pool = self.cache.pool
            blocks = pool.num_blocks + NUM_RESERVED
            self.index_keys = held = like.new_empty(blocks, like.shape[1], pool.block_size, like.shape[3])
            self._zero_reserved([held])
        return held

    def gather(self, blocks: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Copies the seated requests' slots into one row each, for attention that does not read block tables."""
        window = self.window
        gathered = blocks.index_select(0, window.rows_to_read(num_heads, blocks.device))
        block_size = self.cache.pool.block_size
        num_rows, num_blocks = window.tables.shape
        gathered = gathered.view(num_rows, num_heads, num_blocks * block_size, blocks.shape[1] // block_size)
        return gathered[:, :, : window.end]

    def move(
        self, blocks: torch.Tensor, offsets: torch.Tensor, new_blocks: torch.Tensor, new_offsets: torch.Tensor
    ) -> None:
        """Copies slots to other slots, given as block numbers and offsets in blocks, `[batch, slots]` int64 each."""
        for states in self.states:
            states[new_blocks, :, new_offsets] = states[blocks, :, offsets]

    def zero(self, blocks: torch.Tensor, of: list[torch.Tensor] | None = None) -> None:
        """Sets blocks (`[blocks]`, int64) to zero, in all that the layer holds or in some of it."""
        for states in self.states if of is None else of:
            states.index_fill_(0, blocks.to(states.device), 0.0)

    def _zero_reserved(self, of: list[torch.Tensor]) -> None:
        """Sets blocks of new memory that are read before they are written to zero."""
        self.zero(on_device([*range(NUM_RESERVED), *self.cache.clean_blocks], of[0].device), of)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of key slots that a forward can attend to, and the first of them (0)."""
        return self.window.end, 0

    def get_seq_length(self) -> int:
        """Committed slots of the longest row."""
        return max(self.cache.lengths, default=0)

    def get_max_length(self) -> int:
        """-1, for no maximum: a row may have all blocks."""
        return -1


def _writer() -> Callable[..., None]:
    """What writes K/V into blocks: our operator, or plain PyTorch, which a compiler fuses with what comes before."""
    from hf_specdec_kernels import kv_writes

    return kv_writes.write_kv_naive if torch.compiler.is_compiling() else kv_writes.unchecked


class PagedHybridLayer(StateLayer, PagedLayer):
    """A layer with both states and K/V in blocks; see `HybridLayer`."""

    is_initialized = False

    def __init__(self, cache: PagedCache, index: int, number_of_states: int = 1):
        PagedLayer.__init__(self, cache)
        StateLayer.__init__(self, cache, index, number_of_states)

    @property
    def has_memory(self) -> bool:
        return self.is_initialized and self.has_states

    def view_for(self, cache: PagedCache) -> PagedHybridLayer:
        view = PagedHybridLayer(cache, self.index, self.number_of_states)
        view.share(self)
        view.hold(self.keys, self.values)
        return view

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocates keys and values; states are held as they come."""
        PagedLayer.lazy_initialization(self, *args, **kwargs)
