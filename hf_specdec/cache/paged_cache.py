"""`PagedCache`: a `TreeCache` for requests in flight, with K/V in blocks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

from ..uploads import on_device
from . import TreeCache
from .blocks import WASTE_BLOCK, ZERO_BLOCK, BlockPool, BlockTable
from .compaction import Compaction
from .kinds_of_layers import new_layers, states_among
from .paged_layers import PagedHybridLayer, PagedLayer, PagedWindow
from .paged_states import StatesOfRequests


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..graphs.paged import PagedGraphs
    from ..models.probed_layers import CachedLayer
    from ..states import LayerKinds


class PagedCache(StatesOfRequests, TreeCache):
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
        self._states_of = {}
        self.pool, self.device, self.graphs = pool, device, graphs
        self._compactions: list[Compaction] | None = None
        self.write_window: PagedWindow | None = None  # type: ignore[assignment]
        self._lengths_of: dict[BlockTable, int] = {}
        self.prompt_positions: dict[BlockTable, torch.Tensor] = {}
        """Positions of prompts that an indexer counts otherwise than the text after them, `[3, tokens]` int64."""
        self.clean_blocks: set[int] = set()
        """Blocks without NaN."""
        self._cleaned: dict[BlockTable, int] = {}
        """Block tables whose blocks were all found in `clean_blocks`, with their `num_changes` at that time."""
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
        self._tables_tensor = on_device(padded, self.device).view(len(tables), width)
        super().set_lengths([self.length_of(table) for table in tables])
        self.clean(tables)
        if self.state_layers:
            self.seat_states(tables)

    def keep(self, paths: list[list[int] | None]) -> None:
        super().keep(paths)
        self.settle()  # other rows may be seated next

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

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = False) -> int:
        end = max(self.lengths) + offset + num_nodes
        slots = self.lengths_tensor[:, None] + torch.arange(offset, offset + num_nodes, device=self.device)
        width, used = self._tables_tensor.shape[1], self.pool.blocks_for(end)
        tables = self._tables_tensor[:, :used].contiguous()  # copied once here, not in every layer's launch
        if used > width:
            tables = torch.nn.functional.pad(tables, (0, used - width), value=ZERO_BLOCK)
        self.write_window = PagedWindow(*self.places_of_slots(slots), tables, end, self.pool.block_size, in_place)
        return end

    def tables_from(self, first: int, end: int) -> torch.Tensor:
        """Numbers of the blocks that hold slots from `first` to before `end` of every row, `[batch, blocks]`."""
        return self._tables_tensor[:, first // self.pool.block_size : self.pool.blocks_for(end)]

    def places_of_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        sources = self.places_of_slots(start + torch.tensor(nodes, device=self.device))
        targets = self.places_of_slots(start + torch.arange(most, device=self.device))
        self.move_slots(*sources, *targets)

    def _compact(self, paths: list[list[int]], accepted: list[int]) -> None:
        """Moves accepted nodes' K/V into place by a kernel, for all layers at once; `paths` begin with the root."""
        if self._compactions is None:
            self._compactions = Compaction.of(self.layers)
        path, accepted_tensor = (torch.tensor(values, device=self.device) for values in (paths, accepted))
        for compaction in self._compactions:
            compaction(self.lengths_tensor, path, accepted_tensor, self._tables_tensor)

    # ---------------------------------------------------------------------------------------------- blocks without NaN

    def clean(self, tables: list[BlockTable]) -> None:
        """
        Sets blocks of these tables, and the waste block, to zero if they are not in `clean_blocks`: fresh memory, and
        blocks of a request with NaN, may hold some, which reaches what reads them: a masked slot has weight 0, but
        0 · NaN is NaN.
        """
        cleaned = self._cleaned.get
        changed = [table for table in tables if cleaned(table) != table.num_changes]
        unclean = {WASTE_BLOCK}.union(*(table.blocks for table in changed)) - self.clean_blocks
        if unclean:
            self.clean_blocks |= unclean
            self._zero(sorted(unclean))
        self._cleaned |= {table: table.num_changes for table in changed}

    def mark_nan(self, table: BlockTable, but: Iterable[int] = ()) -> None:
        """
        Takes note that a request's blocks and the waste block may hold NaN: `clean` sets them to zero. Blocks that it
        shares, and the blocks `but`, were read without errors: they hold none, and others may read them.
        """
        own = {block for block in table.blocks if not self.pool.is_shared(block)}
        self.clean_blocks -= {WASTE_BLOCK, *own}.difference(but)
        self._cleaned.pop(table, None)

    def wipe_after(self, table: BlockTable, length: int) -> None:
        """Zeroes the K/V in all slots of a request from `length` on: NaN there would reach later forwards."""
        first, offset = divmod(length, self.pool.block_size)
        if first < len(table.blocks):
            for layer in self.layers:
                for states in layer.states if layer.is_initialized else ():
                    states[table.blocks[first], :, offset:] = 0.0
            self._zero([*table.blocks[first + 1 :], WASTE_BLOCK])

    def _zero(self, blocks: list[int]) -> None:
        """Sets blocks to zero in all layers that have memory."""
        if held := [layer for layer in self.layers if layer.is_initialized]:
            index = on_device(blocks, self.device)
            for layer in held:
                layer.zero(index)
