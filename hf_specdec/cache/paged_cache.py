"""`PagedCache`: a `TreeCache` for requests in flight, with K/V in blocks."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from . import TreeCache
from .blocks import NUM_RESERVED, WASTE_BLOCK, ZERO_BLOCK, BlockPool, BlockTable
from .compaction import Compaction
from .index_keys import HoldsIndexKeys
from .state_layers import StateLayer, new_layers, states_among


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..graphs.paged import PagedGraphs
    from ..models.probe import CachedLayer
    from ..states import LayerKinds


class PagedLayer(HoldsIndexKeys, CacheLayerMixin):
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
        pool = self.cache.pool
        # Not zeroed as a whole: memory is taken when it is written, block by block.
        keys, values = (
            states.new_empty(pool.num_blocks + NUM_RESERVED, states.shape[1], pool.block_size, states.shape[3])
            for states in (key_states, value_states)
        )
        self.hold(keys, values)
        self.zero([*range(NUM_RESERVED), *self.cache.clean_blocks], [keys, values])

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
        num_heads, window = key_states.shape[1], self.cache.write_window
        if window.in_place:  # may be compiled: uses no other views of the memory
            self.keys[window.blocks, :, window.offsets] = key_states.transpose(1, 2)
            self.values[window.blocks, :, window.offsets] = value_states.transpose(1, 2)
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
        self.hold_index(index_keys)
        num_heads, window = index_keys.shape[1], self.cache.write_window
        index = window.slots_to_write(num_heads, index_keys.device)
        self.index_keys.flatten(0, 2).index_copy_(0, index, index_keys.flatten(0, 2))
        return self.read_index()

    def positions_of(self, slots: torch.Tensor) -> torch.Tensor:
        positions, known = super().positions_of(slots), self.cache.prompt_positions
        for row, table in enumerate(self.cache.tables if known else ()):
            own = known.get(table)
            if own is not None:
                positions[:, row, : own.shape[1]] = own
        return positions

    def read_index(self) -> torch.Tensor:
        return self.gather(self.index_keys.flatten(0, 1).flatten(1), self.index_keys.shape[1])

    def hold_index(self, like: torch.Tensor) -> None:
        """Takes memory for an indexer's keys, `[batch, heads, nodes, dim]` like these, if there is none yet."""
        if self.index_keys is None:
            pool = self.cache.pool
            blocks = pool.num_blocks + NUM_RESERVED
            self.index_keys = like.new_empty(blocks, like.shape[1], pool.block_size, like.shape[3])
            self.zero([*range(NUM_RESERVED), *self.cache.clean_blocks], [self.index_keys])

    def gather(self, blocks: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Copies the seated requests' slots into one row each, for attention that does not read block tables."""
        window = self.cache.write_window
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

    def zero(self, blocks: list[int], of: list[torch.Tensor] | None = None) -> None:
        """Sets blocks to zero, in all that the layer holds or in some of it."""
        for states in self.states if of is None else of:
            states[torch.tensor(blocks, device=states.device)] = 0.0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of key slots that a forward can attend to, and the first of them (0)."""
        return self.cache.write_window.end, 0

    def get_seq_length(self) -> int:
        """Committed slots of the longest row."""
        return max(self.cache.lengths, default=0)

    def get_max_length(self) -> int:
        """-1, for no maximum: a row may have all blocks."""
        return -1


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


class PagedCache(TreeCache):
    """
    The K/V of all requests in flight. `seat` selects the requests that are the rows of the next forwards; apart from
    that, the cache is used like a `TreeCache`.

    Args:
        num_layers (`int`): decoder layers of the model.
        pool (`BlockPool`): number and size of the blocks.
        device (`torch.device`): device of lengths and block tables; K/V are on the devices of the model's layers.
        graphs (`PagedGraphs`, *optional*): CUDA graphs of forwards that read K/V by the block tables.
        kinds (`LayerKinds`, *optional*): what each layer caches, if some have states (`layer_kinds_of`).
        max_requests (`int`, *optional*): most requests that run at once, for which memory of states is taken.
    """

    is_paged = lengths_are_on_device = True

    def __init__(
        self,
        num_layers: int,
        pool: BlockPool,
        device: torch.device,
        graphs: PagedGraphs | None = None,
        kinds: LayerKinds | None = None,
        max_requests: int | None = None,
    ):
        # Each has one block at least, as `Limits.blocks` counts.
        self._most_states = pool.num_blocks if max_requests is None else min(max_requests, pool.num_blocks)
        layers = new_layers(self, num_layers, kinds, lambda index: PagedLayer(self), PagedHybridLayer)
        Cache.__init__(self, layers=layers)
        self.state_layers = states_among(layers)
        self._states_of: dict[BlockTable, int] = {}
        """Row of the states of every request that was seated."""
        self.pool, self.device, self.graphs = pool, device, graphs
        self._compactions: list[Compaction] | None = None
        self.write_window: PagedWindow | None = None  # type: ignore[assignment]
        self._lengths_of: dict[BlockTable, int] = {}
        self.prompt_positions: dict[BlockTable, torch.Tensor] = {}
        """Positions of prompts that an indexer counts otherwise than the text after them, `[3, tokens]` int64."""
        self._cleaned: dict[BlockTable, int] = {}
        """Block tables whose blocks were all found in `clean_blocks`, with their `num_changes` at that time."""
        self.clean_blocks: set[int] = set()
        """
        Blocks without NaN. A masked slot has weight 0, but 0 · NaN is NaN: fresh memory, and blocks of a request with
        NaN, are set to zero before they are read.
        """
        self.seat([])

    def seat(self, tables: list[BlockTable]) -> None:
        """
        Makes the requests of these block tables the rows of the next forwards. Blocks for the nodes of the forwards
        must be reserved before: nodes without a block are computed, but their K/V are not kept.
        """
        self.tables = tables
        # The last column is `ZERO_BLOCK` in every row, for slots past a request's own blocks.
        width = max((len(table.blocks) for table in tables), default=0) + 1
        padded = [table.blocks + [ZERO_BLOCK] * (width - len(table.blocks)) for table in tables]
        self._tables_tensor = torch.tensor(padded, dtype=torch.long, device=self.device).view(len(tables), width)
        super().set_lengths([self.length_of(table) for table in tables])
        self.clean(tables)
        if self.state_layers:
            self._seat_states(tables)

    def _seat_states(self, tables: list[BlockTable]) -> None:
        """Gives every request a row of the states; that of a new one is as before any token."""
        new = [table for table in tables if table not in self._states_of]
        taken = set(self._states_of.values())
        missing = len(new) + len(taken)
        if self.num_states is None or missing > self.num_states:
            self._grow_states(missing)
        free = (row for row in range(missing) if row not in taken)
        self._states_of |= dict(zip(new, free, strict=False))
        begun = [self._states_of[table] for table in new]
        for layer in self.state_layers:
            layer.begin_rows(begun, self.num_states or 0)
        if begun and self._pending_slots.intersection(begun):
            self._pending_slots -= frozenset(begun)
            self.pending_paths().forget(torch.tensor(begun, device=self.device))
        self.state_rows = torch.tensor(self.slots_of_rows(), dtype=torch.long, device=self.device)

    def _grow_states(self, missing: int) -> None:
        """Makes room for so many rows of the states; for all at once, if graphs keep their addresses."""
        self.flush(sorted(self._pending_slots))
        self._paths = None
        for layer in self.state_layers:
            layer.kernel_pending.clear()
        few = min(max(8, 2 * (self.num_states or 0)), self._most_states)
        self.num_states = max(missing, few if self.graphs is None else self._most_states)

    def slots_of_rows(self) -> list[int]:
        return [self._states_of[table] for table in self.tables]

    def keep(self, paths: list[list[int] | None]) -> None:
        super().keep(paths)
        self.settle()  # other rows may be seated next

    def clean(self, tables: list[BlockTable]) -> None:
        """
        Sets blocks of these tables, and the waste block, to zero if they are not in `clean_blocks`: they may hold NaN.
        """
        cleaned = self._cleaned.get
        changed = [table for table in tables if cleaned(table) != table.num_changes]
        used = {WASTE_BLOCK}.union(*(table.blocks for table in changed))
        self._clean(sorted(used - self.clean_blocks))
        self._cleaned |= {table: table.num_changes for table in changed}

    @property
    def has_memory(self) -> bool:
        """Whether all layers have allocated their memory, which their first forward does."""
        if self.state_layers:
            # One forward writes all of them, but for what some releases give Nemotron-H's experts.
            return any(layer.has_memory for layer in self.state_layers)
        return all(layer.has_memory for layer in self.layers)

    def note_length(self, table: BlockTable, length: int) -> None:
        """Sets the number of a request's tokens, seated or not, whose K/V are in the cache."""
        self._lengths_of[table] = length

    def length_of(self, table: BlockTable) -> int:
        """Number of a request's tokens whose K/V are in the cache."""
        return self._lengths_of.get(table, 0)

    def set_lengths(self, lengths: list[int]) -> None:
        super().set_lengths(lengths)
        for table, length in zip(self.tables, lengths, strict=True):
            self._lengths_of[table] = length

    def forget(self, table: BlockTable) -> None:
        """Drops what the cache holds of a request."""
        self._lengths_of.pop(table, None)
        self._cleaned.pop(table, None)
        self._states_of.pop(table, None)
        self.prompt_positions.pop(table, None)

    def mark_nan(self, table: BlockTable) -> None:
        """Takes note that a request's blocks and the waste block may hold NaN: `clean` sets them to zero."""
        self.clean_blocks.difference_update(table.blocks, [WASTE_BLOCK])
        self._cleaned.pop(table, None)

    def wipe_after(self, table: BlockTable, length: int) -> None:
        """Zeroes the K/V in all slots of a request from `length` on: NaN there would reach later forwards."""
        first, offset = divmod(length, self.pool.block_size)
        for layer in self.layers:
            if layer.is_initialized and first < len(table.blocks):
                for states in layer.states:
                    states[table.blocks[first], :, offset:] = 0.0
                layer.zero([*table.blocks[first + 1 :], WASTE_BLOCK])

    def _clean(self, blocks: list[int]) -> None:
        if not blocks:
            return
        self.clean_blocks.update(blocks)
        for layer in self.layers:
            if layer.is_initialized:
                layer.zero(blocks)

    def allocate(self, sizes: dict[int, CachedLayer]) -> None:
        """Lets layers of these sizes take their memory before their first forward does."""
        for index, size in sizes.items():
            if not self.layers[index].is_initialized:
                (key_heads, key_dim), (value_heads, value_dim) = size.key, size.value
                like = partial(torch.empty, device=size.device)
                keys = like(1, key_heads, 1, key_dim, dtype=size.key_dtype)
                values = like(1, value_heads, 1, value_dim, dtype=size.value_dtype)
                self.layers[index].lazy_initialization(keys, values)
                if size.index is not None:
                    heads, dim = size.index
                    self.layers[index].hold_index(like(1, heads, 1, dim, dtype=size.index_dtype))

    def copy_to(self, cache: TreeCache, tables: list[BlockTable], padding: list[int]) -> None:
        """
        Copies the K/V of requests into the (empty) rows of another cache, after so many slots of `padding` in each
        row, which stay zero.
        """
        lengths = [first + self.length_of(table) for first, table in zip(padding, tables, strict=True)]
        for layer, source in zip(cache.layers, self.layers, strict=True):
            if not source.is_initialized:
                continue
            shape = (len(tables), -1, -1, -1)
            layer.lazy_initialization(source.keys[:1].expand(shape), source.values[:1].expand(shape))
            if source.index_keys is not None:
                layer.hold_index(source.index_keys[:1].expand(shape))
            layer.reserve(max(lengths))
            for row, (table, first) in enumerate(zip(tables, padding, strict=True)):
                blocks = torch.tensor(table.blocks, device=source.device)
                for own, states in zip(layer.states, source.states, strict=True):
                    of_row = states[blocks].transpose(0, 1).flatten(1, 2)[:, : lengths[row] - first]
                    own[row, :, first : lengths[row]] = of_row
        self.flush([self._states_of[table] for table in tables if self.state_layers])
        for layer, source in zip(cache.state_layers, self.state_layers, strict=True):
            layer.load_rows(source, [self._states_of[table] for table in tables])
        cache.set_lengths(lengths)

    def note_states(self, tables: list[BlockTable]) -> list[int]:
        """The slots of requests' states, for a captured step that leaves nodes of theirs pending."""
        slots = [self._states_of[table] for table in tables] if self.state_layers else []
        self._pending_slots |= frozenset(slots)
        return slots

    def drop_states(self, tables: list[BlockTable]) -> None:
        """Keeps nothing of the last step of some requests, whose result is not taken."""
        if self.state_layers:
            slots = torch.tensor([self._states_of[table] for table in tables], device=self.device)
            self.pending_paths().forget(slots)

    def limit_states(self, table: BlockTable, count: int) -> None:
        """Keeps no more than `count` nodes of a request's last step, root included: its text has ended there."""
        if self.state_layers:
            slot = torch.tensor([self._states_of[table]], device=self.device)
            self.pending_paths().limit(slot, count)

    def serve(self, model: PreTrainedModel | None) -> None:
        """Names the model whose forwards use the cache, and its graphs, from now on; None: none for the time being."""
        if self.graphs is not None:
            self.graphs.model = model

    @property
    def storage(self) -> PagedGraphs | None:  # type: ignore[override]
        """The CUDA graphs that run forwards; None without graphs."""
        return self.graphs

    @property
    def block_tables(self) -> torch.Tensor | None:  # type: ignore[override]
        """Block tables by which the next forward's attention reads K/V, `[batch, blocks]`; None if it reads a copy."""
        return self.write_window.tables if self.write_window is not None and self.write_window.in_place else None

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = False) -> None:
        """Prepares the next forwards to write `num_nodes` nodes per row, from slot `lengths + offset` on."""
        end = max(self.lengths) + offset + num_nodes
        slots = self.lengths_tensor[:, None] + torch.arange(offset, offset + num_nodes, device=self.device)
        width, used = self._tables_tensor.shape[1], self.pool.blocks_for(end)
        tables = self._tables_tensor[:, :used].contiguous()  # copied once here, not in every layer's launch
        if used > width:
            tables = torch.nn.functional.pad(tables, (0, used - width), value=ZERO_BLOCK)
        self.write_window = PagedWindow(*self._places(slots), tables, end, self.pool.block_size, in_place)

    def tables_from(self, first: int, end: int) -> torch.Tensor:
        """Numbers of the blocks that hold slots from `first` to before `end` of every row, `[batch, blocks]`."""
        return self._tables_tensor[:, first // self.pool.block_size : self.pool.blocks_for(end)]

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block numbers, and offsets in the blocks, of slots of every row, `[batch, slots]` each."""
        columns = slots.div(self.pool.block_size, rounding_mode="floor").clamp(max=self._tables_tensor.shape[1] - 1)
        blocks = self._tables_tensor.gather(1, columns)
        return torch.where(blocks == ZERO_BLOCK, WASTE_BLOCK, blocks), slots % self.pool.block_size

    def _move(self, kept: list[list[int]]) -> None:
        # Rows that keep fewer nodes copy later slots onto themselves; the next step overwrites these.
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
        """Moves accepted nodes' K/V into place by a kernel, for all layers at once; `paths` begin with the root."""
        if self._compactions is None:
            self._compactions = Compaction.of(self.layers)
        path, accepted_tensor = (torch.tensor(values, device=self.device) for values in (paths, accepted))
        for compaction in self._compactions:
            compaction(self.lengths_tensor, path, accepted_tensor, self._tables_tensor)
