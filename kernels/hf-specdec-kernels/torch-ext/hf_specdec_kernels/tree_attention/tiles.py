"""Launch sizes of tree attention: the tile of a program, and the split of the keys."""

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
        programs_per_sm (`int`): programs that are planned for a multiprocessor at once.
        blocks_of_step (`int`, *optional*, defaults to 1): blocks of committed slots of a step.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    blocks_of_step: int = 1

    def shared_memory(self, head_dim: int, itemsize: int) -> int:
        """
        Upper bound of a program's shared memory in bytes: its queries, the keys and values in flight, and what
        Triton adds, which grows with the masks in flight.
        """
        under_way = 2 * self.num_stages * self.blocks_of_step * self.block_n
        return (self.block_m + under_way) * head_dim * itemsize + 1024 * max(2, self.num_stages)

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
SHORT = 1024
"""Slots of a row up to which programs for few pairs can be small."""
KEYS_OF_SMALL = {16: 256, 32: 32}
"""Keys per multiprocessor up to which small programs are the fastest, for up to 16 and up to 32 pairs."""
BLOCKS_OF_SHORT_PROGRAM = 4
"""Blocks of keys up to which a program takes all in one loop: a second loop would wait for its own first loads."""


def choose_tiles(pairs: int, head_dim: int, dtype: torch.dtype, slots: int, keys: float) -> Tiles:
    """
    The tiles for a launch with `pairs` (node, query head) pairs per K/V head, at most `slots` slots per row, and
    `keys` keys per multiprocessor, over all rows and K/V heads. They are the fastest of sweeps on an H200.

    Up to 64 pairs are bound by memory: one program has many loads in flight. Its tile has 64 pairs also if there are
    fewer, since a smaller one leaves a part of the warp group's multiplication unused. More pairs are bound by the
    tensor cores: one program with two warp groups, and steps of two blocks of keys, so that the accumulated values are
    rescaled half as often; or with fewer keys two programs, one of which multiplies while the other exponentiates.
    Over short texts, programs for few pairs are small and many. float32 without TF32 uses no tensor cores, and head
    dimensions above 128 leave no room: both have tiles of their own. Those above 256 were not measured: their tiles
    are such that the accumulated values of a program, `block_m` times the head dimension, fit into its registers.
    """
    needed = max(16, 1 << (pairs - 1).bit_length())
    if head_dim > 256:
        return Tiles(16, 16, 4, 2, 1) if dtype == torch.float32 else Tiles(min(needed, 32), 32, 8, 2, 1)
    if dtype == torch.float32:
        return Tiles(16, 16, 4, 2, 2) if needed == 16 else Tiles(32, 16, 8, 2, 2)
    if head_dim > 128:
        return Tiles(min(needed, 64), 32, 4, 3, 1)
    if keys >= KEYS_OF_TWO:
        return Tiles(64, 64, 4, 4, 1) if needed <= 64 else Tiles(128, 64, 8, 3, 1, blocks_of_step=2)
    if slots <= SHORT and keys <= KEYS_OF_SMALL.get(needed, 0):
        return Tiles(16, 64, 4, 3, 1)
    return Tiles(64, 32, 4, 6, 1) if needed <= 64 else Tiles(64, 64, 4, 3, 2)


LARGEST_NUM_SPLITS = 64
FEWEST_KEYS, FEWEST_BLOCKS = 64, 4
"""
Keys that are worth a program as long as multiprocessors are idle, and blocks of keys that are worth one that must wait
for another to end.
"""


def choose_num_splits(programs: int, num_blocks: int, multiprocessors: int, tiles: Tiles) -> int:
    """
    The number of splits of the keys, such that `programs` times this number of programs fill the device evenly: the
    smallest number that fills at least 95 % of what the best number fills. There are `LARGEST_NUM_SPLITS` at most,
    and each has at least `FEWEST_KEYS` keys if all programs run at once, else `FEWEST_BLOCKS` blocks.
    """
    at_once = multiprocessors
    if tiles.programs_per_sm > 1 and programs * num_blocks * tiles.block_n >= KEYS_OF_TWO * multiprocessors:
        at_once *= tiles.programs_per_sm
    of_one_wave = min(at_once // programs, num_blocks * tiles.block_n // FEWEST_KEYS)
    most = max(1, min(LARGEST_NUM_SPLITS, max(of_one_wave, num_blocks // FEWEST_BLOCKS)))
    filled = {}
    for splits in range(1, most + 1):
        waves = programs * splits / at_once
        filled[splits] = waves / -(-programs * splits // at_once)
    best = max(filled.values())
    return next(splits for splits, share in filled.items() if share >= 0.95 * best)


@dataclass(frozen=True)
class Launch:
    """
    What is launched.

    Args:
        tiles ([`Tiles`]): sizes of a program.
        num_tiles (`int`): tiles of the (node, query head) pairs of one K/V head.
        num_splits (`int`): splits of the keys.
        one_loop (`bool`): whether a program takes committed slots and nodes in one loop, with a mask on all.
        one_word (`bool`): whether a program reads its nodes' ancestors, 64 at most, before its loops.
    """

    tiles: Tiles
    num_tiles: int
    num_splits: int
    one_loop: bool
    one_word: bool


def plan_launch(
    pairs: int,
    rows: int,
    slots: int,
    num_nodes: int,
    head_dim: int,
    dtype: torch.dtype,
    multiprocessors: int,
    shared_memory: int,
    paged: bool = False,
    window: bool = False,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> Launch:
    """
    The launch for `pairs` (node, query head) pairs of each of `rows` K/V heads (of all rows of the batch), which see
    at most `slots` slots, on a device with `multiprocessors` and `shared_memory` bytes for a program.

    Args:
        num_nodes (`int`): nodes of a tree.
        head_dim (`int`): the larger of the dimensions of keys and values.
        paged (`bool`, *optional*, defaults to `False`): whether keys and values lie in pages.
        window (`bool`, *optional*, defaults to `False`): whether a window limits what a node sees.
        tiles ([`Tiles`], *optional*): these instead of the chosen ones.
        num_splits (`int`, *optional*): this number instead of the chosen one.
    """
    if tiles is None:
        tiles = choose_tiles(pairs, head_dim, dtype, slots, rows * slots / multiprocessors)
        if paged:  # steps of two blocks with page offsets would not fit into the registers
            tiles = replace(tiles, blocks_of_step=1)
        elif window:  # two programs would need a little more shared memory than a multiprocessor has
            tiles = replace(tiles, programs_per_sm=1)
        tiles = tiles.within(shared_memory, 1 << (head_dim - 1).bit_length(), dtype.itemsize)
    num_tiles = -(-pairs // tiles.block_m)
    num_blocks = -(-slots // tiles.block_n)
    if num_splits is None:
        num_splits = choose_num_splits(num_tiles * rows, num_blocks, multiprocessors, tiles)
    one_loop = tiles.blocks_of_step == 1 and num_blocks <= BLOCKS_OF_SHORT_PROGRAM * num_splits
    # With two loops, of several splits only the last one has nodes: the others would wait for words they do not use.
    one_word = num_nodes <= 64 and (one_loop or num_splits == 1)
    return Launch(tiles, num_tiles, num_splits, one_loop, one_word)
