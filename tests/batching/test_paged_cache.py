"""K/V in blocks: the same as in one piece, for requests that come, go and share their steps in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.cache.blocks import NUM_RESERVED, WASTE_BLOCK, ZERO_BLOCK, BlockPool, BlockTable
from hf_specdec.cache.paged_cache import PagedCache


HEADS, DIM, LAYERS, BLOCKS, SIZE = 2, 3, 2, 12, 4
CPU = torch.device("cpu")

steps = st.lists(
    st.tuples(
        st.sets(st.integers(0, 3), min_size=1),  # the requests of the step
        st.integers(1, 6),  # nodes
        st.integers(0, 2**16),  # seed of what is kept
        st.booleans(),  # whether the first of them goes afterwards
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(steps)
def test_holds_what_was_committed(steps: list[tuple[set[int], int, int, bool]]) -> None:
    """Against lists of slots: every step writes nodes to some requests, reads all their slots, and keeps a path."""
    pool, generator = BlockPool(BLOCKS, SIZE), torch.Generator().manual_seed(0)
    cache = PagedCache(LAYERS, pool, CPU)
    tables = {name: BlockTable() for name in range(4)}
    held: dict[int, list[torch.Tensor]] = {name: [] for name in range(4)}  # [layers, 2, heads, dim] per slot
    for names, num_nodes, seed, goes in steps:
        rows = [name for name in sorted(names) if pool.reserve(tables[name], len(held[name]) + num_nodes)]
        if not rows:
            continue
        states = torch.randn(len(rows), num_nodes, LAYERS, 2, HEADS, DIM, generator=generator)
        cache.seat([tables[name] for name in rows])
        cache.write_nodes(0, num_nodes)
        for number, layer in enumerate(cache.layers):
            new = states[:, :, number].permute(2, 0, 3, 1, 4)
            keys, values = layer.update(new[0], new[1])
            assert keys.shape == values.shape == (len(rows), HEADS, max(cache.lengths) + num_nodes, DIM)
            for row, name in enumerate(rows):
                expected = torch.stack([*held[name], *states[row]])[:, number]
                assert torch.equal(keys[row, :, : len(expected)].transpose(0, 1), expected[:, 0])
                assert torch.equal(values[row, :, : len(expected)].transpose(0, 1), expected[:, 1])
        choices = torch.Generator().manual_seed(seed)
        paths: list[list[int] | None] = []
        for row, name in enumerate(rows):
            path = [node for node in range(1, num_nodes) if torch.rand((), generator=choices) < 0.5]
            paths.append(None if torch.rand((), generator=choices) < 0.1 else path)
            if paths[-1] is not None:
                held[name] += [states[row, node] for node in (0, *path)]
        cache.keep(paths)
        assert cache.lengths == [len(held[name]) for name in rows]
        if goes:
            cache.forget(tables[rows[0]])
            pool.release(tables[rows[0]])
            held[rows[0]] = []
    taken = [block for table in tables.values() for block in table.blocks]
    assert len(set(taken)) == len(taken) and sorted(taken + pool._free) == list(range(NUM_RESERVED, BLOCKS + 2))


def test_nodes_without_a_block_harm_nobody() -> None:
    pool = BlockPool(BLOCKS, SIZE)
    cache = PagedCache(1, pool, CPU)
    small, large = BlockTable(), BlockTable()
    assert pool.reserve(small, 1) and pool.reserve(large, 10)
    cache.seat([small, large])
    cache.write_nodes(0, 9)
    keys, _ = cache.layers[0].update(*torch.ones(2, 2, HEADS, 9, DIM))
    assert keys[0, :, :4].eq(1).all() and keys[0, :, 4:].eq(0).all() and keys[1].eq(1).all()
    stored = cache.layers[0].keys
    assert stored[ZERO_BLOCK].eq(0).all() and stored[WASTE_BLOCK].eq(1).any()


def test_reserving_is_all_or_nothing() -> None:
    pool, first, second = BlockPool(3, SIZE), BlockTable(), BlockTable()
    assert pool.reserve(first, 5) and len(first.blocks) == 2 and pool.num_free == 1
    assert not pool.reserve(second, 5) and second.blocks == [] and pool.num_free == 1
    assert pool.reserve(first, 3) and len(first.blocks) == 2
    pool.release(first, 4)
    assert len(first.blocks) == 1 and pool.reserve(second, 8) and pool.num_free == 0
    assert set(first.blocks).isdisjoint(second.blocks)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_equal_lengths_are_told(batch_size: int) -> None:
    pool = BlockPool(BLOCKS, SIZE)
    cache = PagedCache(1, pool, CPU)
    tables = [BlockTable() for _ in range(batch_size)]
    assert all(pool.reserve(table, 6) for table in tables)
    cache.seat(tables)
    cache.write_nodes(0, 3)
    cache.layers[0].update(*torch.ones(2, batch_size, HEADS, 3, DIM))
    cache.keep([[1]] * batch_size)
    assert cache.uniform_length == 2
    cache.seat([*tables[:-1], BlockTable()])
    assert cache.uniform_length == (0 if batch_size == 1 else None)


def test_what_is_cleaned() -> None:
    """Blocks that may hold NaN, and what is written to in place of missing ones; nothing of others is touched."""
    pool = BlockPool(BLOCKS, SIZE)
    cache, tables = PagedCache(LAYERS, pool, CPU), [BlockTable() for _ in range(3)]
    for table in tables:
        pool.reserve(table, 2 * SIZE)
    cache.seat(tables)
    cache.write_nodes(0, 2 * SIZE)
    for layer in cache.layers:
        layer.update(*torch.ones(2, 3, HEADS, 2 * SIZE, DIM))
        layer.keys[WASTE_BLOCK] = layer.values[WASTE_BLOCK] = torch.nan
    with_nan, shared, other = tables
    cache.mark_nan(with_nan)
    cache.clean([shared])
    expected = torch.ones(BLOCKS + NUM_RESERVED)
    expected[[ZERO_BLOCK, WASTE_BLOCK]] = 0.0
    used = [block for table in tables for block in table.blocks]
    for blocks in ([], with_nan.blocks):
        expected[blocks] = 0.0
        for layer in cache.layers:
            for states in (layer.keys, layer.values):
                for block in (ZERO_BLOCK, WASTE_BLOCK, *used):
                    assert states[block].eq(expected[block]).all()
        cache.clean([with_nan, other])
