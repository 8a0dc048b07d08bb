"""Launch sizes of tree attention: tiles, splits and loops, and which sizes share compiled code."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from launch_cases import plan
from triton.runtime.jit import JITFunction

from hf_specdec_kernels.tree_attention import triton as triton_launch


def test_tiles_fit_into_shared_memory() -> None:
    """Tiles are unchanged on a device with 227 KiB, and load fewer keys at once on devices down to 99 KiB."""
    for pairs, rows, slots in ((256, 128, 8256), (256, 8, 8256), (64, 128, 8256), (64, 8, 8256), (4, 8, 512)):
        assert plan(pairs, rows, slots).tiles == plan(pairs, rows, slots, shared_memory=2**30).tiles
    assert plan(256, 128, 8256).tiles.blocks_of_step == 2
    for kib, blocks_of_step, num_stages in ((163, 1, 3), (99, 1, 2), (1, 1, 1)):
        fitting = plan(256, 128, 8256, shared_memory=kib * 1024).tiles
        assert (fitting.blocks_of_step, fitting.num_stages) == (blocks_of_step, num_stages)
        assert kib == 1 or fitting.shared_memory(128, 2) <= kib * 1024
    # Many stages need more than keys and values: 118,528 bytes with a window, by `compile_for_hopper.py`.
    deep = plan(20, 8, 8256).tiles
    assert (deep.block_n, deep.num_stages) == (32, 6) and deep.shared_memory(128, 2) >= 118_528
    assert plan(20, 8, 8256, shared_memory=99 * 1024).tiles.num_stages == 4


def test_tiles_of_large_heads_fit() -> None:
    """Into shared memory, and the accumulated values, float32 each, into 255 registers of each thread."""
    for dtype, pairs, kib in itertools.product((torch.bfloat16, torch.float32), (4, 64, 500), (227, 163, 99)):
        tiles = plan(pairs, 8, 8256, head_dim=512, dtype=dtype, shared_memory=kib * 1024).tiles
        assert tiles.shared_memory(512, dtype.itemsize) <= kib * 1024
        assert tiles.block_m * 512 <= tiles.num_warps * 32 * 128


@pytest.mark.parametrize("kv_heads, group", [(8, 4), (3, 3)])
def test_sizes_share_their_code(kv_heads: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Triton compiles integers that are 1 or multiples of 16 apart, and addresses that are multiples of 16, each time in
    one or two seconds: numbers of rows, nodes and blocks that fall on the same tiles have the same code.
    """
    compiled, tiles = set(), set()

    def noting(name: str) -> Any:
        kernel = getattr(triton_launch, name)
        params = (kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)).params

        def launch(*values: Any, **constants: Any) -> None:
            special = [
                value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else (value == 1, value % 16 == 0)
                for param, value in zip(params, values, strict=False)
                if isinstance(value, int | torch.Tensor) and not param.do_not_specialize
            ]
            tiles.add((name, *constants.items()))
            compiled.add((name, *constants.items(), *special))

        return _Launching(launch)

    for name in ("_tree_attention_kernel", "_combine_kernel"):
        monkeypatch.setattr(triton_launch, name, noting(name))
    for name, value in (("num_multiprocessors", 132), ("shared_memory_limit", 227 * 1024), ("can_overlap", False)):
        monkeypatch.setattr(triton_launch, name, lambda device, value=value: value)
    heads, cache = kv_heads * group, torch.empty(64, kv_heads, 32, 128, dtype=torch.bfloat16)
    for rows, nodes, blocks in itertools.product((1, 3, 5, 16, 26), (1, 3, 4, 16, 21, 64), (5, 16, 17, 64)):
        query = torch.empty(rows, nodes, heads, 128, dtype=torch.bfloat16).transpose(1, 2)
        words, depths = torch.zeros(rows, nodes, 1, dtype=torch.long), torch.zeros(rows, nodes, dtype=torch.long)
        lengths, tables = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, blocks, dtype=torch.long)
        triton_launch.launch_tree_attention(
            query, cache, cache, lengths, words, nodes, lengths, depths, depths, tables, None, 0.1, None, None, None,
            torch.empty_like(query),
        )  # fmt: skip
    # Without splits nothing is written to partial results, whose place the output takes.
    assert len(compiled) == len(tiles) <= 24


class _Launching:
    """What stands in for a kernel, whose launches call a function."""

    def __init__(self, launch: Any):
        self._launch = launch

    def __getitem__(self, grid: Any) -> Any:
        return self._launch


def test_splits_fill_the_device() -> None:
    # Batch 1, 8 K/V heads, 8k slots, 132 multiprocessors: 16 splits make 128 programs...
    assert plan(64, 8, 8256).num_splits == plan(20, 8, 8256).num_splits == 16
    # ...and for more pairs four tiles for each K/V head, two programs of one warp group per multiprocessor.
    launch = plan(256, 8, 8256)
    assert (launch.num_tiles, launch.num_splits, launch.tiles.block_m) == (4, 8, 64)
    # Batch 16: one program per multiprocessor, two programs, or two waves of one.
    tiles = plan(64, 128, 8256).tiles
    assert plan(64, 128, 8256).num_splits == 1
    assert plan(64, 128, 8256, tiles=replace(tiles, programs_per_sm=2)).num_splits == 2
    assert plan(256, 128, 8256).num_splits == 1
    assert plan(64, 8, 64).num_splits == 1
    # With a window two programs do not fit.
    assert plan(256, 8, 8256, window=True).num_splits == 4


def test_few_keys_have_small_programs() -> None:
    def chosen(pairs: int, rows: int, slots: int) -> tuple[int, int, int]:
        """Pairs and keys of a program's tile, and splits."""
        launch = plan(pairs, rows, slots)
        return launch.tiles.block_m, launch.tiles.block_n, launch.num_splits

    # Short texts: as many programs as multiprocessors, with one block of 64 keys or two of 32 at least...
    assert chosen(132, 8, 704) == (64, 64, 5) and chosen(180, 3, 512) == (64, 64, 8)
    assert chosen(64, 8, 704) == chosen(20, 8, 704) == (64, 32, 11)
    assert chosen(4, 8, 704) == (16, 64, 11) and chosen(20, 8, 360) == (16, 64, 6)
    # ...and no second wave of them.
    assert chosen(132, 32, 704) == (64, 64, 1)
    # Small programs are for few keys alone.
    assert chosen(4, 32, 704)[0] == 16 and chosen(4, 64, 704)[0] == chosen(4, 8, 2000)[0] == 64


def test_loops() -> None:
    """Programs of a few blocks have one loop, and read the words of their nodes early if they have only one word."""
    short, long, whole = plan(132, 8, 704), plan(132, 8, 8256), plan(64, 128, 8256)
    assert short.one_loop and short.one_word
    assert not long.one_loop and not long.one_word
    assert not whole.one_loop and whole.one_word and whole.num_splits == 1
    assert plan(256, 8, 704, num_nodes=64).one_word and not plan(260, 8, 704, num_nodes=65).one_word
    assert plan(64, 8, 8192, num_splits=64).one_loop and not plan(64, 8, 8193, num_splits=64).one_loop
    assert not plan(256, 128, 8256, num_splits=64).one_loop  # steps of two blocks
    assert plan(256, 128, 8256, num_splits=64, paged=True).one_loop
