"""`BlockEnds`: what a draft needs to go on behind a block, beside the K/V in it."""

from __future__ import annotations

import torch

from .blocks import NUM_RESERVED, WASTE_BLOCK, BlockPool
from .paged_cache import PagedCache


class BlockEnds:
    """
    A draft's outputs for the last slot of every block. Those of slots that have not been read yet are undefined.

    Args:
        pool (`BlockPool`): the blocks.
        like (`torch.Tensor` of shape `[…, size]`): has the size, dtype and device of the outputs.
    """

    def __init__(self, pool: BlockPool, like: torch.Tensor):
        self._last = pool.block_size - 1
        self.held = like.new_zeros(pool.num_blocks + NUM_RESERVED, like.shape[-1])
        """The outputs, `[blocks, size]`."""

    def write(self, cache: PagedCache, outputs: torch.Tensor) -> None:
        """Takes the ends of blocks out of outputs for the slots after the committed ones, `[rows, slots, size]`."""
        slots = cache.lengths_tensor[:, None] + torch.arange(outputs.shape[1], device=cache.device)
        blocks, offsets = cache.places_of_slots(slots)
        blocks = torch.where(offsets == self._last, blocks, WASTE_BLOCK)
        self.held.index_copy_(0, blocks.flatten(), outputs.flatten(0, 1))
