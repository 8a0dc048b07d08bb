"""K/V memory in blocks, allocated to requests as their texts grow, and shared by texts that begin alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any


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
        num_shared (`int`): blocks at the start that came from another text with the same tokens. Prompts must not be
            read into them again.
        is_private (`bool`): whether the blocks hold what no other text may read: NaN perhaps, or K/V of earlier
            weights.
    """

    blocks: list[int] = field(default_factory=list)
    num_changes: int = 0
    num_shared: int = 0
    is_private: bool = False


class BlockPool:
    """
    Allocates blocks to block tables. A block number denotes the block in every layer of every running model: target
    and draft cache the same tokens, so that one block table serves both.

    A block may be kept under a key, which stands for all tokens up to its end. Block tables can share it, and it stays
    when none has it any more, until its place is needed: the one that was used least recently goes first.

    Args:
        num_blocks (`int`): number of blocks.
        block_size (`int`): tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks + NUM_RESERVED - 1, NUM_RESERVED - 1, -1))
        self._num_users = [0] * (num_blocks + NUM_RESERVED)
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}
        """Kept blocks that no table has, the least recently used first."""
        self.drafted: set[int] = set()
        """Kept blocks that have the draft's K/V as well."""
        self.shifts: dict[int, Any] = {}
        """By kept block, the position shift of the text there, if it is not that of texts; see `Request`."""

    @property
    def num_free(self) -> int:
        """Number of blocks that no table has."""
        return len(self._free) + len(self._idle)

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
        if missing > self.num_free:
            return False
        if missing > 0:
            table.num_changes += 1
            for _ in range(missing):
                block = self._free.pop() if self._free else self._evicted()
                self._num_users[block] = 1
                table.blocks.append(block)
        return True

    def release(self, table: BlockTable, num_slots: int = 0) -> None:
        """Frees the blocks of a table after its first `num_slots` tokens."""
        kept = self.blocks_for(num_slots)
        table.num_changes += len(table.blocks) > kept
        while len(table.blocks) > kept:  # from the end, so that what follows a block is evicted before it
            self._let_go(table.blocks.pop())
        table.num_shared = min(table.num_shared, kept)
        table.is_private &= bool(kept)

    def _let_go(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block] == 0:
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)

    # ---------------------------------------------------------------------------------------- blocks under their keys

    @property
    def kept(self) -> Collection[int]:
        """The blocks that are kept under keys."""
        return self._keys.keys()

    def find(self, key: bytes) -> int | None:
        """The block that is kept under a key; None if there is none."""
        return self._blocks.get(key)

    def num_in_use(self, blocks: Sequence[int]) -> int:
        """How many of these blocks any table has."""
        return sum(self._num_users[block] > 0 for block in blocks)

    def is_shared(self, block: int) -> bool:
        """Whether several tables have a block."""
        return self._num_users[block] > 1

    def share(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Gives a table kept blocks, from its start on, in place of those that it had there."""
        for place in range(table.num_shared, len(blocks)):
            block = blocks[place]
            self._num_users[block] += 1
            self._idle.pop(block, None)
            if place < len(table.blocks):
                block, table.blocks[place] = table.blocks[place], block
                self._let_go(block)
            else:
                table.blocks.append(block)
            table.num_changes += 1
        table.num_shared = max(table.num_shared, len(blocks))

    def keep(self, block: int, key: bytes, is_drafted: bool, shift: Any = None) -> None:
        """
        Keeps a table's block under a key, unless another one is that has as much of it; `is_drafted`: whether it has
        the draft's K/V, `shift`: see `shifts`.
        """
        before = self._blocks.get(key)
        if before is not None and before != block:
            if before in self.drafted or not is_drafted:
                return
            self._forget(before)
        self._blocks[key], self._keys[block] = block, key
        if is_drafted:
            self.drafted.add(block)
        if shift is not None:
            self.shifts[block] = shift

    def forget(self) -> None:
        """Keeps no block any more. Tables have theirs until they release them."""
        for block in list(self._keys):
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]
        self.drafted.discard(block)
        self.shifts.pop(block, None)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def _evicted(self) -> int:
        """The kept block that was used least recently, no longer kept."""
        self._forget(next(iter(self._idle)))
        return self._free.pop()
