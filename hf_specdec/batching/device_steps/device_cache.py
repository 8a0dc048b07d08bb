"""`DevicePagedCache`: the K/V blocks of requests in flight as captured steps see them."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from ...cache import LengthsOnDevice
from ..paged_cache import PagedCache, PagedLayer, PagedWindow


class DevicePagedCache(LengthsOnDevice, PagedCache):
    """
    A view of another cache's blocks for captured steps, where lengths and block tables are known only on the device.
    Only tree forwards use it, and their attention reads K/V by the block tables.

    Args:
        source (`PagedCache`): the other cache, whose layers must have allocated their memory.
        tables (`torch.Tensor` of shape `[rows, blocks]`, int64): block table of every row; the last column is
            `ZERO_BLOCK`.
    """

    def __init__(self, source: PagedCache, tables: torch.Tensor):
        Cache.__init__(self, layers=[PagedLayer(self) for _ in source.layers])
        self.pool, self.device, self.graphs = source.pool, source.device, None
        self._tables_tensor, self.lengths = tables, [0] * len(tables)
        for layer, held in zip(self.layers, source.layers, strict=True):
            layer.hold(held.keys, held.values)

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> None:
        slots = self.lengths_tensor[:, None] + torch.arange(offset, offset + num_nodes, device=self.device)
        tables, block_size = self._tables_tensor, self.pool.block_size
        end = tables.shape[1] * block_size
        self.write_window = PagedWindow(*self._places(slots), tables, end, block_size, in_place=True)
