"""Tree attention in Triton against plain PyTorch: odd shapes, all options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from launch_cases import plan
from selection import fast

from hf_specdec_kernels import pack_ancestors, tree_attention
from hf_specdec_kernels.tree_attention.naive import tree_attention_naive
from hf_specdec_kernels.tree_attention.tiles import Tiles
from hf_specdec_kernels.tree_attention.triton import launch_tree_attention


TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """Sizes and options of one comparison; lengths and paddings are random, and the last row's cache is full."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 5
    num_nodes: int | None = None
    head_dim: int = 16
    value_dim: int | None = None
    capacity: int = 100
    dtype: torch.dtype = torch.float32
    padding: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    shared_tree: bool = False
    page_size: int | None = None
    num_splits: int | None = None
    slots_first: bool = False
    tiles: Tiles | None = None


def inputs(case: Case, device: torch.device, first_length: int | None = None) -> dict:
    """Arguments of `tree_attention_naive` for a case: random trees over random, partly unwritten caches."""
    nodes = case.num_nodes or case.queries
    longest = case.capacity - nodes
    lengths = torch.randint(0, longest + 1, (case.batch,))
    if first_length is not None:
        lengths[0] = first_length
    lengths[-1] = longest
    first_slots = (lengths * torch.rand(case.batch)).long() if case.padding else None
    query = torch.randn(case.batch, case.queries, case.heads, case.head_dim).transpose(1, 2)
    key = torch.randn(case.batch, case.kv_heads, case.capacity, case.head_dim)
    value = torch.randn(case.batch, case.kv_heads, case.capacity, case.value_dim or case.head_dim)
    # Slots that were never written, and padding, may hold anything.
    slots = torch.arange(case.capacity)
    unwritten = slots >= lengths[:, None] + nodes
    if first_slots is not None:
        unwritten |= slots < first_slots[:, None]
    key, value = (states.masked_fill(unwritten[:, None, :, None], torch.nan) for states in (key, value))
    trees = 1 if case.shared_tree else case.batch
    ancestors, depths = random_trees(trees, nodes)
    block_tables = None
    if case.page_size is not None:
        key, value, block_tables = paged(key, value, case.page_size)
    elif case.slots_first:
        key, value = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (key, value))
    queries = slice(nodes - case.queries, nodes)
    return {
        "query": query.to(device, case.dtype),
        "key": key.to(device, case.dtype),
        "value": value.to(device, case.dtype),
        "lengths": lengths.to(device, torch.int32),
        "ancestors": pack_ancestors(ancestors[:, queries]).to(device),
        "num_nodes": nodes,
        "first_slots": None if first_slots is None else first_slots.to(device),
        "query_depths": depths[:, queries].to(device),
        "node_depths": depths.to(device),
        "block_tables": None if block_tables is None else block_tables.to(device),
        "sinks": torch.randn(case.heads).to(device, case.dtype) if case.sinks else None,
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
    }


def random_trees(rows: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestors-or-self `[rows, nodes, nodes]` bool and depths `[rows, nodes]` of random trees with one root."""
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    depths = torch.zeros(rows, nodes, dtype=torch.long)
    for row in range(rows):
        for node in range(1, nodes):
            parent = int(torch.randint(max(node - 6, 0), node, ()))
            ancestors[row, node] |= ancestors[row, parent]
            depths[row, node] = depths[row, parent] + 1
    return ancestors, depths


def paged(key: torch.Tensor, value: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values in shuffled blocks of `size` slots, and their block table `[batch, blocks]` int32."""
    batch, kv_heads, capacity = key.shape[:3]
    blocks = -(-capacity // size)
    order = torch.randperm(batch * blocks)
    pages = []
    for states in (key, value):
        padded = torch.nn.functional.pad(states, (0, 0, 0, blocks * size - capacity), value=torch.nan)
        split = padded.view(batch, kv_heads, blocks, size, -1).transpose(1, 2).flatten(0, 1)
        pages.append(torch.empty_like(split).index_copy(0, order, split))
    return *pages, order.view(batch, blocks).int()


def compare(case: Case, device: torch.device, first_length: int | None = None) -> None:
    arguments = inputs(case, device, first_length)
    query, value = arguments["query"], arguments["value"]
    out = query.new_empty(case.batch, case.queries, case.heads, value.shape[3])
    launch_tree_attention(**arguments, num_splits=case.num_splits, out=out, tiles=case.tiles)
    exact = {
        name: tensor.double() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor
        for name, tensor in arguments.items()
    }
    expected = tree_attention_naive(**exact)
    assert expected.isfinite().all()
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


SMALL = {
    "usual": Case(),
    "one node": Case(queries=1),
    "one row of the length of its tree": Case(batch=1, capacity=7, queries=7),
    "no grouping": Case(kv_heads=4),
    "seven heads on one": Case(heads=7, kv_heads=1, queries=3),
    "several tiles": Case(batch=1, heads=8, kv_heads=1, queries=11),
    "more than a word of nodes": Case(batch=1, heads=2, kv_heads=2, queries=70, capacity=150),
    "float16": Case(dtype=torch.float16),
    "float16, odd head dimension": Case(dtype=torch.float16, head_dim=80),
    "values of another size": Case(head_dim=24, value_dim=16),
    "sinks, values of another size": Case(head_dim=24, value_dim=16, sinks=True, window=9),
    "large heads": Case(batch=1, queries=3, head_dim=512, capacity=40),
    "large heads, pages": Case(batch=1, queries=3, head_dim=512, capacity=48, page_size=16, dtype=torch.float16),
    "padding": Case(batch=3, padding=True),
    "shared tree": Case(batch=3, shared_tree=True),
    "short window": Case(window=3, padding=True),
    "window": Case(window=40, padding=True),
    "soft cap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "pages": Case(page_size=16, padding=True),
    "slots before heads": Case(slots_first=True),
    "last level of a growing tree": Case(queries=3, num_nodes=12, window=9),
}


FAST = [("usual", 1), ("padding", 1), *((name, 3) for name in SMALL)]


@pytest.mark.parametrize("name, num_splits", fast(product(SMALL, (1, 3)), FAST))
def test_against_naive(name: str, num_splits: int, device: torch.device) -> None:
    compare(replace(SMALL[name], num_splits=num_splits), device)


STEPS = product(
    ("usual", "one row of the length of its tree", "padding", "window", "soft cap", "pages"), (2, 4), (1, 3)
)


@pytest.mark.parametrize(
    "name, blocks_of_step, num_splits", fast(STEPS, [("usual", 4, 1), ("window", 2, 3), ("pages", 2, 1)])
)
def test_steps_of_several_blocks(name: str, blocks_of_step: int, num_splits: int, device: torch.device) -> None:
    """Tree attention with several blocks per step, for lengths that are no multiple of a step or a block."""
    tiles = Tiles(16, 16, 4, 2, 1, blocks_of_step=blocks_of_step)
    case = replace(SMALL[name], num_splits=num_splits, tiles=tiles, dtype=torch.float16)
    for capacity in (case.capacity, 16 * blocks_of_step * 3 + case.queries):
        compare(replace(case, capacity=capacity), device)


SEVERAL = product(("usual", "more than a word of nodes", "padding", "window", "pages"), [(3, 400), (20, 1400)])


@pytest.mark.parametrize(
    "name, num_splits, capacity",
    fast([(name, *sizes) for name, sizes in SEVERAL], [("padding", 3, 400), ("window", 3, 400)]),
)
def test_two_loops_over_several_splits(name: str, num_splits: int, capacity: int, device: torch.device) -> None:
    """Splits whose programs have whole blocks, nodes, both, or (in the first row) nothing, one block at a time."""
    tiles, window = Tiles(16, 16, 4, 2, 1), None if SMALL[name].window is None else capacity - 50
    options = {"capacity": capacity, "tiles": tiles, "num_splits": num_splits, "window": window}
    case = replace(SMALL[name], **options, dtype=torch.float16)
    assert not plan(4, 4, (window or capacity - 5) + 5, tiles=tiles, num_splits=num_splits).one_loop
    compare(case, device, first_length=5)


def test_all_options_together(device: torch.device) -> None:
    options = {"window": 23, "softcap": 3.0, "sinks": True, "padding": True, "page_size": 8, "dtype": torch.float16}
    compare(Case(batch=3, num_splits=5, **options), device)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing_gets_zeros(sinks: bool, num_splits: int, device: torch.device) -> None:
    arguments = inputs(Case(sinks=sinks), device) | {"num_splits": num_splits}
    arguments["lengths"] = torch.zeros_like(arguments["lengths"])
    arguments["ancestors"][:, 2] = 0
    out = arguments["query"].new_empty(2, 5, 4, 16)
    arguments["key"], arguments["value"] = (arguments[name].nan_to_num() for name in ("key", "value"))
    launch_tree_attention(**arguments, out=out)
    naive = tree_attention_naive(**arguments)
    assert (out[:, 2] == 0).all() and (naive[:, 2] == 0).all()
    torch.testing.assert_close(out, naive, atol=2e-5, rtol=2e-5)


def test_nan_of_a_query_is_not_lost() -> None:
    """The plain version shows it, too: it is a fault of the model. What a query does not see is none."""
    arguments = inputs(Case(queries=3), torch.device("cpu"))
    arguments["query"][0, :, 1] = torch.nan
    out = tree_attention_naive(**arguments)  # [batch, queries, heads, value_dim]
    is_nan = out.isnan().flatten(2).any(dim=2)
    assert is_nan[0].tolist() == [False, True, False] and not is_nan[1:].any()
    nothing = arguments | {"query": arguments["query"][:, :, :0], "query_depths": None, "node_depths": None}
    nothing["ancestors"] = arguments["ancestors"][:, :0]
    assert tree_attention_naive(**nothing).shape == (out.shape[0], 0, *out.shape[2:])


def test_strided_output(device: torch.device) -> None:
    arguments = inputs(Case(), device)
    out = arguments["query"].new_empty(2, 4, 5, 16).transpose(1, 2)
    for num_splits in (1, 2):
        launch_tree_attention(**arguments, num_splits=num_splits, out=out)
        torch.testing.assert_close(out, tree_attention_naive(**arguments), atol=2e-5, rtol=2e-5)


def test_nodes_past_the_block_table_have_no_keys(device: torch.device) -> None:
    """Whatever lies in memory after a row's table is no block of that row."""
    arguments = inputs(Case(batch=1, page_size=16, capacity=96), device)
    arguments["lengths"].fill_(94)  # two nodes are in the last block, and three would be in the next one
    for name in ("key", "value"):
        arguments[name] = torch.nn.functional.pad(arguments[name], (0, 0, 0, 0, 0, 0, 0, 1), value=torch.nan)
    table = arguments["block_tables"]
    memory = torch.full((2, table.shape[1]), len(arguments["key"]) - 1, dtype=torch.int32, device=device)
    memory[:1] = table
    arguments["block_tables"] = memory[:1]
    out = arguments["query"].new_empty(1, 5, 4, 16)
    launch_tree_attention(**arguments, num_splits=None, out=out)
    torch.testing.assert_close(out, tree_attention_naive(**arguments))


# ------------------------------------------------------------------------------------------------------------ on a GPU

LARGE = {
    f"{nodes} nodes, {dtype}, head dimension {head_dim}": Case(
        batch=3, heads=8, kv_heads=2, queries=nodes, head_dim=head_dim, capacity=2500, dtype=dtype, padding=True
    )
    for nodes in (1, 16, 63, 64, 257, 1024)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for head_dim in (64, 80, 96, 128, 256)
}
OPTIONS = {
    "window": {"window": 512},
    "soft cap": {"softcap": 50.0},
    "sinks": {"sinks": True},
    "pages": {"page_size": 64},
    "pages that are no power of two": {"page_size": 48},
    "slots before heads": {"slots_first": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_large_shapes(name: str, device: torch.device) -> None:
    compare(LARGE[name], device)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 16, 100])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_at_large_shapes(option: str, queries: int, device: torch.device) -> None:
    case = Case(batch=2, heads=16, kv_heads=4, queries=queries, head_dim=128, capacity=4000, dtype=torch.bfloat16)
    compare(replace(case, **OPTIONS[option]), device)


@pytest.mark.gpu
def test_replay_of_a_graph_with_other_lengths(device: torch.device) -> None:
    arguments = inputs(Case(batch=2, queries=16, head_dim=128, capacity=3000, dtype=torch.bfloat16), device)
    arguments["key"], arguments["value"] = (arguments[name].nan_to_num() for name in ("key", "value"))
    out = tree_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(**arguments, out=out)
    for lengths in ([5, 2900], [1000, 0]):
        arguments["lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(out, tree_attention_naive(**arguments), atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper")
def test_overlapping_launches(device: torch.device) -> None:
    """Calls captured in sequence: a launch that does not wait would read an earlier call's partial results."""
    case = Case(batch=2, queries=16, head_dim=128, capacity=3000, dtype=torch.bfloat16)
    calls = [inputs(case, device) for _ in range(4)]
    tiles = Tiles(64, 64, 4, 3, 1)
    outs = [arguments["query"].new_empty(2, 16, case.heads, 128) for arguments in calls]

    def attend() -> None:
        for arguments, out in zip(calls, outs, strict=True):
            launch_tree_attention(**arguments, num_splits=16, out=out, tiles=tiles)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for arguments, out in zip(calls, outs, strict=True):
            torch.testing.assert_close(out, tree_attention_naive(**arguments), atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """Offsets past 2³¹ elements, from a slot stride of 2²⁵ in a view whose elements overlap."""
    slots, stride, head_dim = 70, 2**25, 64
    memory = torch.zeros(slots * stride, dtype=torch.bfloat16, device=device)
    key = memory.as_strided((1, 1, slots, head_dim), (1, 1, stride, 1))
    key.copy_(torch.randn(1, 1, slots, head_dim))
    arguments = inputs(Case(batch=1, heads=2, kv_heads=1, head_dim=64, capacity=slots, dtype=torch.bfloat16), device)
    near = arguments | {"key": key.contiguous(), "value": key.contiguous()}
    out = tree_attention(**arguments | {"key": key, "value": key})
    torch.testing.assert_close(out, tree_attention(**near), atol=0, rtol=0)
