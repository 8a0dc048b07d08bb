"""The cache of a speculative call: alone, and loaded from and stored into transformers' own."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.caches import assert_same_cache
from support.models import tiny_config
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from transformers import DynamicCache

from hf_specdec.cache import TreeCache
from hf_specdec.cache.blocks import ZERO_BLOCK, BlockPool, BlockTable
from hf_specdec.cache.device_paged_cache import DevicePagedCache
from hf_specdec.cache.paged_cache import PagedCache


HEADS, DIM, LAYERS = 2, 3, 2
CPU = torch.device("cpu")


class States:
    """K/V that are all different, so that a misplaced one shows: states of node `j` of forward `i` of row `b`."""

    def __init__(self, batch_size: int):
        self.batch_size, self.generator = batch_size, torch.Generator().manual_seed(0)

    def draw(self, num_nodes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values `[batch, heads, nodes, dim]` of every layer."""
        shape = (self.batch_size, HEADS, num_nodes, DIM)
        return [
            (torch.randn(shape, generator=self.generator), torch.randn(shape, generator=self.generator))
            for _ in range(LAYERS)
        ]


class NaiveCache:
    """What `TreeCache` should hold: for every layer and row, the committed K/V as lists of slots."""

    def __init__(self, batch_size: int):
        self.slots: list[list[list[Any]]] = [[[] for _ in range(batch_size)] for _ in range(LAYERS)]

    def commit(self, states: list[tuple[torch.Tensor, torch.Tensor]], nodes: list[list[int]]) -> None:
        for layer, (keys, values) in zip(self.slots, states, strict=True):
            for row, kept in enumerate(nodes):
                layer[row] += [(keys[row, :, node], values[row, :, node]) for node in kept]

    def assert_equals(self, cache: TreeCache) -> None:
        for layer, slots in zip(cache.layers, self.slots, strict=True):
            assert cache.lengths == list(map(len, slots)) == cache.lengths_tensor.tolist()
            for row, held in enumerate(slots):
                for slot, (key, value) in enumerate(held):
                    assert torch.equal(layer.keys[row, :, slot], key)
                    assert torch.equal(layer.values[row, :, slot], value)


def write(
    cache: TreeCache, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One forward: every layer writes its states, and gets to see what `update` returns."""
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(states)]


@st.composite
def steps_of_a_call(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[list[int], list[list[int] | None]]]]:
    """
    Batch size, lengths of the prefill's chunks, and steps: into how many forwards a step splits its nodes, and the
    path that each row accepts (increasing nodes, not necessarily the first ones).
    """
    batch_size = draw(st.integers(1, 3))
    chunks = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        forwards = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        nodes = range(1, sum(forwards))
        paths = [
            draw(st.none() | st.lists(st.sampled_from(nodes), unique=True, max_size=4).map(sorted)) if nodes else []
            for _ in range(batch_size)
        ]
        steps.append((forwards, paths))
    return batch_size, chunks, steps


@settings(max_examples=60, deadline=None)
@given(call=steps_of_a_call(), capacity=st.integers(1, 40))
def test_tree_cache_against_a_naive_one(call: Any, capacity: int) -> None:
    batch_size, chunks, steps = call
    states, naive = States(batch_size), NaiveCache(batch_size)
    cache = TreeCache(LAYERS, batch_size, CPU, capacity)
    for chunk in chunks:
        assert cache.layers[0].get_mask_sizes(chunk) == (cache.get_seq_length() + chunk, 0)
        drawn = states.draw(chunk)
        seen = write(cache, drawn)
        naive.commit(drawn, [list(range(chunk))] * batch_size)
        assert seen[0][0].shape == (batch_size, HEADS, cache.get_seq_length(), DIM)
    cache.adopt_prefill()
    naive.assert_equals(cache)
    for forwards, paths in steps:
        drawn_nodes = []
        for offset, num_nodes in zip([sum(forwards[:i]) for i in range(len(forwards))], forwards, strict=True):
            cache.write_nodes(offset, num_nodes)
            drawn = states.draw(num_nodes)
            drawn_nodes.append(drawn)
            for (keys, values), (all_keys, all_values) in zip(drawn, write(cache, drawn), strict=True):
                assert all_keys.shape[2] == all_values.shape[2] == max(cache.lengths) + offset + num_nodes
                for row, length in enumerate(cache.lengths):
                    slots = slice(length + offset, length + offset + num_nodes)
                    assert torch.equal(all_keys[row, :, slots], keys[row])
                    assert torch.equal(all_values[row, :, slots], values[row])
            naive.assert_equals(cache)  # what is committed stays untouched
        cache.keep(paths)
        joined = [
            tuple(torch.cat([part[layer][which] for part in drawn_nodes], dim=2) for which in (0, 1))
            for layer in range(LAYERS)
        ]
        naive.commit(joined, [[] if path is None else [0, *path] for path in paths])
        naive.assert_equals(cache)


def test_capacity_doubles() -> None:
    cache, states = TreeCache(LAYERS, 1, CPU, capacity=4), States(1)
    sizes = []
    for num_nodes in (3, 1, 1, 4, 1, 30):
        write(cache, states.draw(num_nodes))
        sizes.append(cache.layers[0].keys.shape[2])
        assert cache.layers[1].values.shape[2] == sizes[-1]
    assert sizes == [4, 4, 8, 16, 16, 40]


def test_keeping_the_first_nodes_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, states = TreeCache(LAYERS, 2, CPU, capacity=16), States(2)
    write(cache, states.draw(3))
    cache.adopt_prefill()
    monkeypatch.setattr(cache, "_move", None)
    cache.write_nodes(0, 4)
    write(cache, states.draw(4))
    cache.keep([[1, 2], []])
    assert cache.lengths == [6, 4]


def filled(config: Any, states: list[tuple[torch.Tensor, torch.Tensor]], chunk: int) -> DynamicCache:
    """transformers' cache, after forwards of `chunk` tokens."""
    cache = DynamicCache(config=config)
    for start in range(0, states[0][0].shape[2], chunk):
        for layer, (keys, values) in enumerate(states):
            cache.update(keys[:, :, start : start + chunk], values[:, :, start : start + chunk], layer)
    return cache


@pytest.mark.parametrize("length", [1, 5, 11, 12, 13, 30])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_load_and_store(family: str, length: int) -> None:
    """Through a `TreeCache` and back, and going on from there, sliding windows (12) included."""
    config = tiny_config(family, num_hidden_layers=LAYERS)
    states = States(2)
    drawn = states.draw(length)
    cache = filled(config, drawn, chunk=4)
    tree_cache = TreeCache(LAYERS, 2, CPU, capacity=1)
    tree_cache.load(cache)
    assert tree_cache.lengths == [length, length]
    for layer, (keys, _), held in zip(tree_cache.layers, drawn, cache.layers, strict=True):
        known = held.keys.shape[2]  # a sliding window has dropped the others
        assert torch.equal(layer.keys[:, :, length - known : length], keys[:, :, length - known :])
    stored = DynamicCache(config=config)
    tree_cache.store(stored, length)
    assert_same_cache(stored, cache)
    more = states.draw(5)
    for (mine, _), (theirs, _) in zip(write(stored, more), write(cache, more), strict=True):
        assert torch.equal(mine, theirs)
    assert_same_cache(stored, cache)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_store_drops_what_was_not_asked_for(family: str) -> None:
    config = tiny_config(family, num_hidden_layers=LAYERS)
    drawn = States(2).draw(20)
    tree_cache = TreeCache(LAYERS, 2, CPU, capacity=32)
    write(tree_cache, drawn)
    stored = DynamicCache(config=config)
    tree_cache.store(stored, 17)
    assert_same_cache(
        stored, filled(config, [(keys[:, :, :17], values[:, :, :17]) for keys, values in drawn], chunk=4)
    )
    drawn[0][0].zero_()
    tree_cache.layers[0].keys.zero_()
    assert stored.layers[0].keys.abs().sum() > 0, "a copy: the tree cache is as large as its capacity"


def test_store_into_a_cache_without_a_config() -> None:
    """`DynamicCache()` makes its layers as they come."""
    drawn = States(1).draw(6)
    tree_cache = TreeCache(LAYERS, 1, CPU, capacity=8)
    write(tree_cache, drawn)
    stored = DynamicCache()
    tree_cache.store(stored, 6)
    plain = DynamicCache()
    write(plain, drawn)
    assert_same_cache(stored, plain)


def test_store_into_a_cropped_cache_that_records_its_past() -> None:
    """The slots that a crop had dropped are not made up."""
    drawn, caches = States(1).draw(40), []
    config = tiny_config("mistral", num_hidden_layers=LAYERS)
    for _ in range(2):
        caches.append(DynamicCache(config=config))
        caches[-1].activate_past_recording()
        write(caches[-1], [(keys[:, :, :30], values[:, :, :30]) for keys, values in drawn])
        caches[-1].crop(-2)
    more = [(keys[:, :, 28:], values[:, :, 28:]) for keys, values in drawn]
    tree_cache = TreeCache(LAYERS, 1, CPU, capacity=40)
    tree_cache.load(caches[0])
    write(tree_cache, more)
    tree_cache.store(caches[0], 40)
    write(caches[1], more)
    assert caches[0].layers[0].keys.shape[2] == 11 + 12
    assert_same_cache(*caches)


@pytest.mark.slow
@pytest.mark.any_version
@pytest.mark.parametrize(
    "runs",
    [
        False,
        pytest.param(
            True,
            marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
        ),
    ],
    ids=["its code", "its results"],
)
def test_compiled_writes_are_in_place(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What the compiler makes of a write touches the nodes' slots alone: no buffer is as large as the cache. A C++
    compiler, which takes long, has to run for the results alone.
    """
    if not runs:
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, *source: lambda *arguments: None)
        monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # found out by compiling something
    pool, tables = BlockPool(num_blocks=8, block_size=16), [BlockTable(), BlockTable()]
    assert all(pool.reserve(table, 64) for table in tables)
    cache = PagedCache(1, pool, torch.device("cpu"))
    cache.seat(tables)
    states = torch.randn(2, 4, 7, 16)
    cache.write_nodes(0, 7)
    cache.layers[0].update(states, states)
    cache.layers[0].keys.zero_()
    behind = DevicePagedCache(cache, torch.tensor([table.blocks + [ZERO_BLOCK] for table in tables]))
    behind.write_tables = behind.writable_tables()
    behind.at(torch.tensor([7, 3]))
    behind.write_nodes(0, 5)
    new, expected = torch.randn(2, 4, 5, 16), cache.layers[0].keys.clone()
    for row, start in enumerate([7, 3]):
        expected[tables[row].blocks[0], :, start : start + 5] = 2 * new[row]

    def write(new: torch.Tensor) -> torch.Tensor:
        keys, _ = behind.layers[0].update(2 * new, new)
        return keys[2:, :, :3].sum()

    with torch._inductor.config.patch(force_disable_caches=not runs):
        _, sources = run_and_get_code(torch.compile(write, fullgraph=True, dynamic=False), new)
    whole = str(tuple(expected.shape))
    assert whole in sources[0] and f"empty_strided_cpu({whole}" not in sources[0]
    assert "async_compile.cpp_pybinding" in sources[0]
    assert torch.equal(cache.layers[0].keys, expected) is runs
