"""`DevicePagedCache`: the K/V blocks of requests in flight as captured steps see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..states import KernelForward, NodeTopology
from .blocks import WASTE_BLOCK, ZERO_BLOCK
from .kinds_of_layers import states_among
from .paged_cache import PagedCache
from .paged_layers import PagedWindow


def places_of(
    lengths: torch.Tensor, numbers: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Blocks of some nodes, and their offsets in these, `[rows, nodes]` int64 each.

    Args:
        lengths (`torch.Tensor` of shape `[rows]`, int64): committed slots of every row.
        numbers (`torch.Tensor` of shape `[nodes]`, int64): which slots after the committed ones.
        tables (`torch.Tensor` of shape `[rows, blocks]`, int64): block tables. Nodes past a row's last block, which
            are not kept, may be past its table, too.
        block_size (`int`): slots of a block.
    """
    slots = lengths[:, None] + numbers
    if block_size & (block_size - 1) == 0:
        columns, offsets = slots >> (block_size.bit_length() - 1), slots & (block_size - 1)
    else:
        columns, offsets = slots // block_size, slots % block_size
    return tables.gather(1, columns.clamp(max=tables.shape[1] - 1)), offsets


class DevicePagedCache(PagedCache):
    """
    A view of another cache's blocks for captured steps, where lengths and block tables are known only on the device.
    Only tree forwards use it, and their attention reads K/V by the block tables.

    Args:
        source (`PagedCache`): the other cache, whose layers must have allocated their memory.
        tables (`torch.Tensor` of shape `[rows, blocks]`, int64): block table of every row; the last column is
            `ZERO_BLOCK`.
        state_slots (`torch.Tensor` of shape `[rows]`, int64, *optional*): slot of every row's states, -1 for none, if
            the other cache has states.
    """

    is_on_device = True

    def __init__(self, source: PagedCache, tables: torch.Tensor, state_slots: torch.Tensor | None = None):
        Cache.__init__(self, layers=[layer.view_for(self) for layer in source.layers])
        self.pool, self.device, self.graphs = source.pool, source.device, None
        self._tables_tensor, self.lengths = tables, [0] * len(tables)
        self._ranges: dict[int, torch.Tensor] = {}
        self._static_nodes: dict[int, tuple[torch.Tensor, dict[Any, torch.Tensor]]] = {}
        self.state_layers = states_among(self.layers)
        if self.state_layers:
            self.state_rows, self._paths = state_slots, source.pending_paths()

    @property
    def uniform_length(self) -> None:
        """None: the host does not know the lengths."""
        return None

    def at(self, lengths: torch.Tensor) -> None:
        """Sets the number of committed slots of every row, `[batch]` int64, for the following forwards."""
        self._lengths_tensor = lengths

    @contextmanager
    def behind(self, number: int) -> Iterator[None]:
        lengths = self.lengths_tensor
        self.at((lengths - number).clamp(min=0))
        try:
            yield
        finally:
            self.at(lengths)

    def note_static(self, ancestors: torch.Tensor) -> None:
        """Takes note of `ancestors` that are the same in every run: states compute what they need of these once."""
        if self.state_layers:
            self._static_nodes.setdefault(id(ancestors), (ancestors, {}))

    def follow(
        self,
        ancestors: torch.Tensor,
        counts: list[int] | None = None,
        prompt_counts: list[int] | None = None,
        by_kernel: bool = False,
    ) -> None:
        """Lets state layers run over the nodes of a tree by the kernels, which commit what is pending."""
        assert by_kernel and self.state_rows is not None
        self.topology = NodeTopology(ancestors, max_depth=self.max_depth)
        _, of_nodes = self._static_nodes.get(id(ancestors), (None, None))
        self.kernel_forward = KernelForward(self.topology, self.state_rows, self.pending_paths(), of_nodes)

    def keep_states(self, path: torch.Tensor, accepted: torch.Tensor, is_nan: torch.Tensor) -> None:
        """
        Keeps the root and the accepted nodes of the last forward, for the next one to commit. A row with NaN keeps
        nothing, and loses its slot: nothing is taken from it until its host has loaded it again.

        Args:
            path (`torch.Tensor` of shape `[rows, depth + 1]`, int64): nodes, the root first.
            accepted (`torch.Tensor` of shape `[rows]`, int64): accepted nodes; below 0 in rows that keep nothing.
            is_nan (`torch.Tensor` of shape `[rows]`, bool): rows with NaN.
        """
        if self.kernel_forward is not None:
            self.kernel_forward.keep(path, (accepted + 1).clamp(min=0).masked_fill(is_nan, 0))
            self.leave(is_nan)

    def keep_chain(self, counts: torch.Tensor) -> None:  # type: ignore[override]
        """Keeps the first `counts` nodes (`[rows]`, int64) of the last forward, a chain; the next one commits them."""
        if self.kernel_forward is not None:
            nodes = self._numbers(self.kernel_forward.topology.num_queries)
            self.kernel_forward.keep(nodes.expand(len(counts), -1), counts)

    def leave(self, is_left: torch.Tensor) -> None:
        """Takes their slot from some rows (`[rows]`, bool), whose states stay until the host has loaded them again."""
        if self.state_layers and self.state_rows is not None:
            self.state_rows.masked_fill_(is_left, -1)

    max_depth: int | None = None
    """Most levels below the root of the next forward's nodes, if known."""
    write_tables: torch.Tensor
    """`writable_tables`, which the owner of a step makes once for all its forwards."""

    def writable_tables(self) -> torch.Tensor:
        """The block tables by which nodes are written, `[rows, blocks]` int64: without a block, to `WASTE_BLOCK`."""
        return torch.where(self._tables_tensor == ZERO_BLOCK, WASTE_BLOCK, self._tables_tensor)

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> int:
        size, numbers = self.pool.block_size, self._numbers(offset + num_nodes)[offset:]
        blocks, offsets = self.places(self.lengths_tensor, numbers, self.write_tables, size)
        end = self._tables_tensor.shape[1] * size
        self.write_window = PagedWindow(blocks, offsets, self._tables_tensor, end, size, in_place=True)
        return end

    places: Any = staticmethod(places_of)
    """`places_of`, compiled or not."""

    def _numbers(self, count: int) -> torch.Tensor:
        """0 to before `count`, in memory that a graph may read as long as the cache lives."""
        if count not in self._ranges:
            self._ranges[count] = torch.arange(count, device=self.device)
        return self._ranges[count]
