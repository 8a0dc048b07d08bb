"""Blocks of K/V memory: handed out to requests token by token, so that memory is bounded by the tokens in use."""

from __future__ import annotations

from dataclasses import dataclass, field


ZERO_BLOCK = 0
"""Read where a request has no block yet: never written."""
WASTE_BLOCK = 1
"""Written by nodes that no request has room for: never read."""
NUM_RESERVED = 2


@dataclass(eq=False)
class BlockTable:
    """
    The blocks of one request: slot t of its text is slot t % block_size of block t // block_size.

    Args:
        blocks (`list[int]`): block numbers, in the order of the text.
        num_changes (`int`): how often these have become others.
    """

    blocks: list[int] = field(default_factory=list)
    num_changes: int = 0


class BlockPool:
    """
    Hands out blocks. A block's number stands for its slots in every layer of every model that runs: target and draft
    keep the same tokens, so that one table serves both.

    Args:
        num_blocks (`int`): blocks there are.
        block_size (`int`): tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks + NUM_RESERVED - 1, NUM_RESERVED - 1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Tokens that fit if one request has all blocks."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_slots // self.block_size)

    def reserve(self, table: BlockTable, num_slots: int) -> bool:
        """Gives a request room for its first `num_slots` tokens; False, and nothing is changed, if there is none."""
        missing = self.blocks_for(num_slots) - len(table.blocks)
        if missing > len(self._free):
            return False
        if missing > 0:
            table.num_changes += 1
            for _ in range(missing):
                table.blocks.append(self._free.pop())
        return True

    def release(self, table: BlockTable, num_slots: int = 0) -> None:
        """Takes back what lies behind the first `num_slots` tokens of a request."""
        kept = self.blocks_for(num_slots)
        table.num_changes += len(table.blocks) > kept
        while len(table.blocks) > kept:
            self._free.append(table.blocks.pop())
