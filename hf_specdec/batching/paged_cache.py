"""`PagedCache`: a `TreeCache` whose rows are requests that come and go, with K/V in blocks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..cache import LengthsOnDevice, TreeCache
from ..kernels import Compaction
from .blocks import NUM_RESERVED, WASTE_BLOCK, ZERO_BLOCK, BlockPool, BlockTable


if TYPE_CHECKING:
    from .graphs import PagedGraphs


class PagedLayer(CacheLayerMixin):
    """K/V of one attention layer, `[blocks, kv_heads, block_size, head_dim]`."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, cache: PagedCache):
        super().__init__()
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> PagedCache:
        """The cache that the layer is part of."""
        return self._cache()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        pool = self.cache.pool
        # Not zeroed as a whole: memory is taken when it is written, block by block.
        self.keys, self.values = (
            states.new_empty(pool.num_blocks + NUM_RESERVED, states.shape[1], pool.block_size, states.shape[3])
            for states in (key_states, value_states)
        )
        # The same memory, as it is written and as it is read.
        self._slots = [states.view(-1, states.shape[3]) for states in (self.keys, self.values)]
        self._blocks = [states.flatten(0, 1).flatten(1) for states in (self.keys, self.values)]
        self.is_initialized = True
        self.zero([*range(NUM_RESERVED), *self.cache.clean_blocks])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes new K/V (`[batch, kv_heads, nodes, head_dim]`) where `PagedCache.write_nodes` said. Returns all blocks
        as they are to a forward that attends in place, else copies of all slots up to the last one written, `[batch,
        kv_heads, slots, head_dim]`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_heads, window = key_states.shape[1], self.cache.write_window
        if window.in_place:  # these forwards may be compiled: no other views of the same memory
            self.keys[window.blocks, :, window.offsets] = key_states.transpose(1, 2)
            self.values[window.blocks, :, window.offsets] = value_states.transpose(1, 2)
            return self.keys, self.values
        index = window.slots_to_write(num_heads, self.device)
        for slots, states in zip(self._slots, (key_states, value_states), strict=True):
            slots.index_copy_(0, index, states.reshape(-1, states.shape[3]))
        return self.gather(self._blocks[0], num_heads), self.gather(self._blocks[1], num_heads)

    def gather(self, blocks: torch.Tensor, num_heads: int) -> torch.Tensor:
        """The slots of the seated requests in a row each, for attention that does not read block tables."""
        window = self.cache.write_window
        gathered = blocks.index_select(0, window.rows_to_read(num_heads, self.device))
        block_size = self.cache.pool.block_size
        gathered = gathered.view(len(window.tables), num_heads, -1, blocks.shape[1] // block_size)
        return gathered[:, :, : window.end]

    def move(
        self, blocks: torch.Tensor, offsets: torch.Tensor, new_blocks: torch.Tensor, new_offsets: torch.Tensor
    ) -> None:
        """Copies slots to other slots; block numbers and offsets in the blocks, `[batch, slots]` int64 each."""
        for states in (self.keys, self.values):
            states[new_blocks, :, new_offsets] = states[blocks, :, offsets]

    def zero(self, blocks: list[int]) -> None:
        """Zeroes blocks."""
        index = torch.tensor(blocks, device=self.device)
        for states in (self.keys, self.values):
            states[index] = 0.0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a forward gets to see, and the number of the first."""
        return self.cache.write_window.end, 0

    def get_seq_length(self) -> int:
        """Committed slots of the longest row."""
        return max(self.cache.lengths, default=0)

    def get_max_length(self) -> int:
        """-1: a row may have all blocks."""
        return -1


class PagedWindow:
    """
    Where a forward writes and what it reads.

    Args:
        blocks, offsets (`torch.Tensor` of shape `[batch, nodes]`, int64): where each node goes.
        tables (`torch.Tensor` of shape `[batch, blocks]`, int64): the blocks to read.
        end (`int`): one past the last slot of any row.
        block_size (`int`): slots of a block.
        in_place (`bool`, *optional*, defaults to `False`): whether attention reads the blocks where they are.
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
        """Slots of `[blocks · heads · block_size]`, in the order of batch, head and node."""
        key = (num_heads, device)
        if key not in self._slots:
            heads = torch.arange(num_heads, device=self.blocks.device)[None, :, None]
            slots = (self.blocks[:, None] * num_heads + heads) * self.block_size + self.offsets[:, None]
            self._slots[key] = slots.flatten().to(device)
        return self._slots[key]

    def rows_to_read(self, num_heads: int, device: torch.device) -> torch.Tensor:
        """Rows of `[blocks · heads]`, in the order of batch, head and block."""
        key = (num_heads, device)
        if key not in self._rows:
            heads = torch.arange(num_heads, device=self.tables.device)
            rows = self.tables[:, None, :] * num_heads + heads[None, :, None]
            self._rows[key] = rows.flatten().to(device)
        return self._rows[key]


class PagedCache(TreeCache):
    """
    The K/V of many requests. `seat` says which of them are the rows of the next forwards; otherwise it is used like a
    `TreeCache`.

    Args:
        num_layers (`int`): decoder layers of the model.
        pool (`BlockPool`): says how many blocks there are, and of what size.
        device (`torch.device`): where lengths and tables live; K/V are where the model computes them.
        graphs (`PagedGraphs`, *optional*): run forwards that attend in place.
    """

    lengths_are_on_device = True

    def __init__(self, num_layers: int, pool: BlockPool, device: torch.device, graphs: PagedGraphs | None = None):
        Cache.__init__(self, layers=[PagedLayer(self) for _ in range(num_layers)])
        self.pool, self.device, self.graphs = pool, device, graphs
        self._compactions: list[Compaction] | None = None
        self.write_window: PagedWindow | None = None  # type: ignore[assignment]
        self._lengths_of: dict[BlockTable, int] = {}
        self._cleaned: dict[BlockTable, int] = {}
        """Requests whose blocks are all clean, and how often these had changed by then."""
        self.clean_blocks: set[int] = set()
        """
        Blocks that hold numbers. What a mask hides counts nothing times its value, which is NaN if that is NaN: memory
        as it comes, and what a request of NaN leaves behind, is zeroed before it is read.
        """
        self.seat([])

    def seat(self, tables: list[BlockTable]) -> None:
        """
        Makes requests, by their tables, the rows of the next forwards. They must have all the blocks that they are to
        fill: nodes without a block are computed, but not kept.
        """
        self.tables = tables
        # The last column has no block of anybody: slots past a request's own are looked up there.
        width = max((len(table.blocks) for table in tables), default=0) + 1
        padded = [table.blocks + [ZERO_BLOCK] * (width - len(table.blocks)) for table in tables]
        self._tables_tensor = torch.tensor(padded, dtype=torch.long, device=self.device).view(len(tables), width)
        super().set_lengths([self.length_of(table) for table in tables])
        self.clean(tables)

    def clean(self, tables: list[BlockTable]) -> None:
        """Zeroes the blocks of these requests of which nobody knows what they hold."""
        cleaned = self._cleaned.get
        changed = [table for table in tables if cleaned(table) != table.num_changes]
        self._clean([block for table in changed for block in table.blocks if block not in self.clean_blocks])
        self._cleaned |= {table: table.num_changes for table in changed}

    @property
    def has_memory(self) -> bool:
        """Whether all layers have written already."""
        return all(layer.is_initialized for layer in self.layers)

    def note_length(self, table: BlockTable, length: int) -> None:
        """Says how many tokens of a request, seated or not, have their K/V in here."""
        self._lengths_of[table] = length

    def length_of(self, table: BlockTable) -> int:
        """Tokens of a request whose K/V are in here."""
        return self._lengths_of.get(table, 0)

    def set_lengths(self, lengths: list[int]) -> None:
        super().set_lengths(lengths)
        for table, length in zip(self.tables, lengths, strict=True):
            self._lengths_of[table] = length

    def forget(self, table: BlockTable) -> None:
        """Nothing of a request is in here any more."""
        self._lengths_of.pop(table, None)
        self._cleaned.pop(table, None)

    def soil(self, table: BlockTable) -> None:
        """Notes that a request's blocks may hold NaN."""
        self.clean_blocks.difference_update(table.blocks)
        self._cleaned.pop(table, None)
        self._clean([WASTE_BLOCK])

    def _clean(self, blocks: list[int]) -> None:
        if not blocks:
            return
        self.clean_blocks.update(blocks)
        for layer in self.layers:
            if layer.is_initialized:
                layer.zero(blocks)

    @property
    def storage(self) -> PagedGraphs | None:  # type: ignore[override]
        """What runs forwards."""
        return self.graphs

    @property
    def block_tables(self) -> torch.Tensor | None:  # type: ignore[override]
        """Those that the next forward reads in place."""
        return self.write_window.tables if self.write_window is not None and self.write_window.in_place else None

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = False) -> None:
        """The next forwards write `num_nodes` nodes at `lengths + offset`."""
        end = max(self.lengths) + offset + num_nodes
        slots = self.lengths_tensor[:, None] + torch.arange(offset, offset + num_nodes, device=self.device)
        width, used = self._tables_tensor.shape[1], self.pool.blocks_for(end)
        tables = self._tables_tensor[:, :used].contiguous()  # once here, not in the launches of all layers
        if used > width:
            tables = torch.nn.functional.pad(tables, (0, used - width), value=ZERO_BLOCK)
        self.write_window = PagedWindow(*self._places(slots), tables, end, self.pool.block_size, in_place)

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block numbers and offsets of slots of every row, `[batch, slots]` each."""
        columns = slots.div(self.pool.block_size, rounding_mode="floor").clamp(max=self._tables_tensor.shape[1] - 1)
        blocks = self._tables_tensor.gather(1, columns)
        return torch.where(blocks == ZERO_BLOCK, WASTE_BLOCK, blocks), slots % self.pool.block_size

    def _move(self, kept: list[list[int]]) -> None:
        # Rows that keep fewer nodes copy what is already there; those slots are written again by the next step.
        most = max(map(len, kept))
        nodes = [row + list(range(len(row), most)) for row in kept]
        if self.graphs is not None:
            self._compact(nodes, [len(row) - 1 for row in kept])
            return
        start = self.lengths_tensor[:, None]
        sources = self._places(start + torch.tensor(nodes, device=self.device))
        targets = self._places(start + torch.arange(most, device=self.device))
        self._move_slots(*sources, *targets)

    def _compact(self, paths: list[list[int]], accepted: list[int]) -> None:
        """The same by a kernel, for all layers at once."""
        if self._compactions is None:
            self._compactions = Compaction.of(self.layers)
        path, accepted_tensor = (torch.tensor(values, device=self.device) for values in (paths, accepted))
        for compaction in self._compactions:
            compaction(self.lengths_tensor, path, accepted_tensor, self._tables_tensor)


class DevicePagedCache(LengthsOnDevice, PagedCache):
    """
    The blocks of another cache, for rows whose lengths and tables only the device knows: for steps that run there as a
    whole. Tree forwards alone use it, and attend in place.

    Args:
        source (`PagedCache`): the other, all of whose layers have their memory.
        tables (`torch.Tensor` of shape `[rows, blocks]`, int64): the blocks of every row; the last one is nobody's.
    """

    def __init__(self, source: PagedCache, tables: torch.Tensor):
        Cache.__init__(self, layers=[PagedLayer(self) for _ in source.layers])
        self.pool, self.device, self.graphs = source.pool, source.device, None
        self._tables_tensor, self.lengths = tables, [0] * len(tables)
        for layer, held in zip(self.layers, source.layers, strict=True):
            for name in ("keys", "values", "dtype", "device", "_slots", "_blocks", "is_initialized"):
                setattr(layer, name, getattr(held, name))

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> None:
        slots = self.lengths_tensor[:, None] + torch.arange(offset, offset + num_nodes, device=self.device)
        tables, block_size = self._tables_tensor, self.pool.block_size
        end = tables.shape[1] * block_size
        self.write_window = PagedWindow(*self._places(slots), tables, end, block_size, in_place=True)
