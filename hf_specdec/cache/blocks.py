"""K/V memory in blocks, allocated to requests as their texts grow."""

from __future__ import annotations

from dataclasses import dataclass, field


ZERO_BLOCK = 0
"""The block that is read where a request has no block yet; it is never written."""
WASTE_BLOCK = 1
"""The block that nodes without a block of their request write to; it is never read."""
NUM_RESERVED = 2


@dataclass(eq=False)
class BlockTable:
    """
    The blocks of one request: slot t of its text is slot t % block_size of block t // block_size.

    Args:
        blocks (`list[int]`): block numbers, in the order of the text.
        num_changes (`int`): how often the blocks have changed.
    """

    blocks: list[int] = field(default_factory=list)
    num_changes: int = 0


class BlockPool:
    """
    Allocates blocks to block tables. A block number denotes the block in every layer of every running model: target
    and draft cache the same tokens, so that one block table serves both.

    Args:
        num_blocks (`int`): number of blocks.
        block_size (`int`): tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks + NUM_RESERVED - 1, NUM_RESERVED - 1, -1))

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Tokens that fit if one request has all blocks."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_slots: int) -> int:
        """Number of blocks that hold `num_slots` tokens."""
        return -(-num_slots // self.block_size)

    def reserve(self, table: BlockTable, num_slots: int) -> bool:
        """Extends a table to hold `num_slots` tokens. Returns False, and changes nothing, if blocks are missing."""
        missing = self.blocks_for(num_slots) - len(table.blocks)
        if missing > len(self._free):
            return False
        if missing > 0:
            table.num_changes += 1
            for _ in range(missing):
                table.blocks.append(self._free.pop())
        return True

    def release(self, table: BlockTable, num_slots: int = 0) -> None:
        """Frees the blocks of a table after its first `num_slots` tokens."""
        kept = self.blocks_for(num_slots)
        table.num_changes += len(table.blocks) > kept
        while len(table.blocks) > kept:
            self._free.append(table.blocks.pop())
