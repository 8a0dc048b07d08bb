"""Launch sizes of tree attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tiles:
    """
    Sizes of a launch of tree attention.

    Args:
        block_m (`int`): (node, query head) pairs of a program.
        block_n (`int`): keys of a block; divides 64.
        num_warps (`int`): warps of a program.
        num_stages (`int`): pipeline stages: steps whose loads are in flight at once.
        programs_per_sm (`int`): programs that fit on a multiprocessor at once.
        blocks_of_step (`int`, *optional*, defaults to 1): blocks of committed slots of a step.
        fewest_blocks (`int`, *optional*, defaults to 4): fewest blocks of keys that are worth a program.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    blocks_of_step: int = 1
    fewest_blocks: int = 4

    def shared_memory(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of a program in bytes: its queries, the keys and values in flight, and a little more."""
        under_way = 2 * self.num_stages * self.blocks_of_step * self.block_n
        return (self.block_m + under_way) * head_dim * itemsize + 2048

    def within(self, shared_memory: int, head_dim: int, itemsize: int) -> Tiles:
        """Tiles with fewer keys in flight, as far as needed to fit into `shared_memory` bytes."""
        tiles = self
        while tiles.shared_memory(head_dim, itemsize) > shared_memory:
            if tiles.blocks_of_step > 1:
                tiles = replace(tiles, blocks_of_step=tiles.blocks_of_step // 2)
            elif tiles.num_stages > 1:
                tiles = replace(tiles, num_stages=tiles.num_stages - 1)
            else:
                break
        return tiles


KEYS_OF_TWO = 2 * 8 * 64
"""
Keys per multiprocessor (two programs with eight blocks of 64 keys) from which on a second program hides more latency
than it costs.
"""


def fills_twice(keys: int, multiprocessors: int) -> bool:
    """Whether `keys`, over all rows and K/V heads, are enough for two programs on every multiprocessor."""
    return keys >= KEYS_OF_TWO * multiprocessors


SHORT = 1024
"""Slots of a row up to which programs for few queries are as small as they can be, and many."""
BLOCKS_OF_SHORT_PROGRAM = 4
"""Blocks of keys up to which a program takes all in one loop: a second loop would wait for its own first loads."""


def choose_tiles(pairs: int, head_dim: int, dtype: torch.dtype, fills: bool = True, slots: int = SHORT + 1) -> Tiles:
    """
    The tiles for a launch with `pairs` (node, query head) pairs per K/V head, and at most `slots` slots per row.

    Small tiles are bound by memory: two programs share a multiprocessor, or with too few keys (not `fills`) one
    program has more loads in flight. Large tiles are bound by the tensor cores: one program with two warp groups, and
    steps of two blocks of keys, so that the accumulated values are rescaled half as often. float32 without TF32 uses
    no tensor cores, and needs small tiles.
    """
    needed = max(16, 1 << (pairs - 1).bit_length())
    if dtype == torch.float32:
        return Tiles(16, 16, 4, 2, 2) if needed == 16 else Tiles(32, 16, 8, 2, 2)
    if head_dim > 128:
        return Tiles(min(needed, 64), 32, 4, 3, 1)
    if not fills:  # the fastest of a sweep on an H200
        if slots <= SHORT and needed <= 32:
            return Tiles(16, 64, 4, 3, 1, fewest_blocks=1)
        return Tiles(needed, 32, 4, 6, 1) if needed <= 64 else Tiles(64, 64, 4, 3, 1)
    if needed <= 64:
        return Tiles(needed, 64, 4, 3, 2) if needed <= 32 else Tiles(needed, 64, 4, 4, 1)
    return Tiles(128, 64, 8, 3, 1, blocks_of_step=2)


LARGEST_NUM_SPLITS = 64


def choose_num_splits(programs: int, num_blocks: int, multiprocessors: int, tiles: Tiles) -> int:
    """
    The number of splits of the keys, such that `programs` times this number of programs fill the device evenly: the
    smallest number that fills at least 95 % of what the best number fills.
    """
    most = max(1, min(LARGEST_NUM_SPLITS, num_blocks // tiles.fewest_blocks))
    at_once = multiprocessors
    if tiles.programs_per_sm > 1 and fills_twice(programs * num_blocks * tiles.block_n, multiprocessors):
        at_once *= tiles.programs_per_sm
    filled = {}
    for splits in range(1, most + 1):
        waves = programs * splits / at_once
        filled[splits] = waves / -(-programs * splits // at_once)
    best = max(filled.values())
    return next(splits for splits, share in filled.items() if share >= 0.95 * best)
