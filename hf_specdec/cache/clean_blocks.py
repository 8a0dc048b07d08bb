"""`KeepsBlocksClean`: blocks of a paged cache that may hold NaN are set to zero before they are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..uploads import on_device
from .blocks import WASTE_BLOCK, BlockPool, BlockTable


class KeepsBlocksClean:
    """
    The part of a `PagedCache` that has to do with NaN. A masked slot has weight 0, but 0 · NaN is NaN: fresh memory,
    and blocks of a request with NaN, are set to zero before they are read.
    """

    pool: BlockPool
    device: torch.device
    layers: list[Any]
    clean_blocks: set[int]
    """Blocks without NaN."""
    _cleaned: dict[BlockTable, int]
    """Block tables whose blocks were all found in `clean_blocks`, with their `num_changes` at that time."""

    def clean(self, tables: list[BlockTable]) -> None:
        """
        Sets blocks of these tables, and the waste block, to zero if they are not in `clean_blocks`: they may hold NaN.
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
