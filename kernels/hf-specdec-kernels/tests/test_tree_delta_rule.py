"""The delta rule over a tree, in Triton against a state for each node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from selection import fast
from state_cases import NUM_SLOTS, OF_STATES, TOLERANCE, Tree, close, delta_pending, in_double, rows_of

from hf_specdec_kernels import DeltaPending, PendingPath, commit_delta_rule, tree_delta_rule
from hf_specdec_kernels.tree_delta_rule import commit_delta_rule_naive, tree_delta_rule_naive
from hf_specdec_kernels.tree_delta_rule.triton import Tiles, launch_commit_delta_rule, launch_tree_delta_rule


@dataclass(frozen=True)
class Case:
    nodes: int = 9
    slots: tuple[int, ...] = (3,)
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (24, 20)
    channels: bool = False
    dtype: torch.dtype = torch.float32
    shared: bool = False  # one tree for all rows
    chain: bool = False
    normalize: bool = True
    steepness: float = 1.0  # of the decay
    tiles: Tiles | None = None

    def tree(self, device: torch.device) -> Tree:
        return Tree(1 if self.shared else len(self.slots), self.nodes, device, self.chain)

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        (heads, key_heads), (key_dim, value_dim) = self.heads, self.dims
        sizes = (key_heads * key_dim, key_heads * key_dim, heads * value_dim)
        mixed = torch.randn(len(self.slots), self.nodes, sum(sizes)).to(device, self.dtype)  # a convolution's output
        split = [
            part.unflatten(2, (-1, dim))
            for part, dim in zip(mixed.split(sizes, 2), (key_dim, key_dim, value_dim), strict=True)
        ]
        shape = (len(self.slots), self.nodes, heads, *((key_dim,) if self.channels else ()))
        decay = -self.steepness * torch.rand(shape, device=device)
        return [*split, decay, torch.rand(shape[:3]).to(device, self.dtype)]


class Layer:
    """A layer whose steps are computed twice: by the kernel, and in float64 by the naive version."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        heads, (key_dim, value_dim) = case.heads[0], case.dims
        self.states = torch.randn(NUM_SLOTS, heads, key_dim, value_dim).to(device)
        self.pending = delta_pending(case.nodes + 3, case.heads, case.dims, case.dtype, device, case.channels)
        self.turns = torch.tensor([0, 1, 5, 2, 4]).to(device)
        self.expected, self.expected_pending = self.states.double(), in_double(self.pending)

    def step(self, rows: PendingPath, tree: Tree, inputs: list[torch.Tensor]) -> torch.Tensor:
        case, value = self.case, inputs[2]
        normalize, scale = case.normalize, case.dims[0] ** -0.5
        common = (tree.ancestors, *rows, normalize, scale)
        out = torch.full(value.shape, torch.nan).to(value)
        deepest = int(tree.depths.max())
        launch_tree_delta_rule(*inputs, self.states, *self.pending, *common, deepest, out, case.tiles)
        wanted = tree_delta_rule_naive(*in_double(inputs), self.expected, *self.expected_pending, *common)
        close(out, wanted, TOLERANCE[case.dtype])
        self.check()
        self.turns[rows.slots[rows.slots >= 0]] += 1
        return out

    def commit(self, rows: PendingPath) -> None:
        launch_commit_delta_rule(self.states, *self.pending, *rows, self.case.normalize)
        commit_delta_rule_naive(self.expected, *self.expected_pending, *rows, self.case.normalize)
        self.check()

    def check(self) -> None:
        tolerance = OF_STATES[self.case.dtype]
        close(self.states, self.expected, tolerance)
        for found, wanted in zip(self.pending, self.expected_pending, strict=True):
            close(found, wanted, tolerance)


CASES = {
    "plain": Case(heads=(4, 2)),
    "one node": Case(nodes=1),
    "a chain of one head": Case(nodes=20, chain=True, heads=(1, 1), shared=True, slots=(1, 4)),
    "64 nodes": Case(nodes=64, slots=(4, 1), heads=(2, 1)),
    "33 nodes": Case(nodes=33, slots=(4, 0), heads=(1, 1), normalize=False, steepness=0.3),
    "stacked": Case(nodes=40, slots=(4, 1), tiles=Tiles(32, 0, stack=True)),
    "stacked in parts": Case(dtype=torch.float16, tiles=Tiles(32, 2, stack=True), nodes=33, heads=(1, 1)),
    "float16 in parts": Case(dtype=torch.float16, tiles=Tiles(32, 2), nodes=17, heads=(1, 1)),
    "without norms": Case(normalize=False, dims=(16, 40), steepness=0.1, tiles=Tiles(32, 0), nodes=5, heads=(1, 1)),
    "steep decay": Case(steepness=60.0),
    "channels": Case(channels=True, heads=(2, 2)),
    "channels, one node": Case(channels=True, nodes=1, heads=(2, 2)),
    "channels, 40 nodes": Case(channels=True, nodes=40, slots=(4, 2), heads=(2, 2)),
    "channels, steep decay": Case(channels=True, steepness=80.0, nodes=20, heads=(1, 1), dims=(24, 16)),
}


@pytest.mark.parametrize("name", fast(CASES, CASES.keys() - {"64 nodes", "channels, 40 nodes"}))
def test_against_naive(name: str, device: torch.device) -> None:
    """Two steps: from a state that was written, and after a path of each row; then a commit."""
    run(CASES[name], device)


def run(case: Case, device: torch.device) -> None:
    layer, tree = Layer(case, device), None
    for counts in ((0, 0), (4, 1)):
        rows = rows_of(tree, case.slots, counts, layer.turns)
        tree = case.tree(device)
        layer.step(rows, tree, case.inputs(device))
    layer.commit(rows_of(tree, case.slots, (1, 5), layer.turns))


def test_trees_between_single_nodes(device: torch.device) -> None:
    """Steps of one node use the same memory as steps of trees, and rows may rest."""
    case = Case(slots=(3, 0), heads=(1, 1))
    layer, tree, one = Layer(case, device), case.tree(device), replace(case, nodes=1)
    layer.step(rows_of(None, case.slots, (0, 0), layer.turns), tree, case.inputs(device))
    for counts in ((4, 0), (1, 1)):
        rows, tree = rows_of(tree, case.slots, counts, layer.turns), one.tree(device)
        layer.step(rows, tree, one.inputs(device))
    rows = rows_of(tree, case.slots, (1, 0), layer.turns)
    layer.step(rows_of(tree, (0,), (1,), layer.turns), Tree(1, 9, device), replace(case, slots=(0,)).inputs(device))
    layer.commit(rows)


def test_a_chunk_of_equal_tokens(device: torch.device) -> None:
    """64 equal keys that overwrite each other: powers of L would reach 1e18."""
    case = Case(nodes=64, slots=(2,), heads=(1, 1), dims=(16, 16), chain=True, steepness=0.0)
    layer = Layer(case, device)
    query, key, value, decay, beta = case.inputs(device)
    key[:] = key[:, :1]
    layer.step(rows_of(None, (2,), (0,), layer.turns), case.tree(device), [query, key, value, decay, beta * 0 + 1])
    layer.commit(rows_of(Tree(1, 64, device, chain=True), (2,), (64,), layer.turns, width=70))


@pytest.mark.parametrize("channels", [False, True])
def test_what_is_not_a_number_stays_where_it_is(channels: bool, device: torch.device) -> None:
    """Void nodes reach no other nodes but those below them, void rows no other rows and no state."""
    case = Case(slots=(3, 0, -1), channels=channels, heads=(1, 1))
    layer, tree = Layer(case, device), case.tree(device)
    inputs = case.inputs(device)
    leaves = [node for node in range(1, 9) if node not in tree.parents[0]]
    clean = [tensor.clone() for tensor in inputs]
    for tensor, value in zip(inputs, (torch.nan, torch.nan, torch.inf, torch.nan, -torch.inf), strict=True):
        tensor[0, leaves[0]], tensor[1:] = value, torch.nan
    before = layer.states[[0, 1, 2, 4]].clone()
    rows = rows_of(None, case.slots, (0, 0, 0), layer.turns)
    out = torch.full(inputs[2].shape, torch.nan).to(inputs[2])
    common = (tree.ancestors, *rows, True, 1.0)
    launch_tree_delta_rule(*inputs, layer.states, *layer.pending, *common, 8, out)
    wanted = tree_delta_rule_naive(*in_double(clean), layer.expected, *layer.expected_pending, *common)
    others = [node for node in range(9) if node != leaves[0]]
    close(out[0, others], wanted[0, others], 2e-5)
    close(layer.pending.deltas[3, others], layer.expected_pending[1][3, others], 2e-5)
    assert not out[2].any() and layer.pending.deltas[[1, 2, 4]].isnan().all()
    commit_delta_rule(layer.states, layer.pending, rows)
    assert torch.equal(layer.states[[0, 1, 2, 4]], before)


def test_refusals(device: torch.device) -> None:
    case = Case(slots=(3, 0))
    layer, tree = Layer(case, device), case.tree(device)
    rows, inputs = rows_of(None, case.slots, (0, 0), layer.turns), case.inputs(device)

    def call(inputs=inputs, states=layer.states, pending=layer.pending, ancestors=tree.ancestors, rows=rows):
        return tree_delta_rule(*inputs, states, pending, ancestors, rows)

    assert call().shape == inputs[2].shape
    with pytest.raises(TypeError, match=r"`states` has dtype torch.bfloat16; convert it to torch.float32"):
        call(states=layer.states.bfloat16())
    with pytest.raises(ValueError, match="has room for 8 nodes, the step has 9"):
        call(pending=DeltaPending(*delta_pending(8, case.heads, case.dims, case.dtype, device)))
    with pytest.raises(ValueError, match="There are 65 nodes"):
        many = replace(case, nodes=65)
        pending = DeltaPending(*delta_pending(65, case.heads, case.dims, case.dtype, device))
        call(many.inputs(device), pending=pending, ancestors=many.tree(device).ancestors)
    with pytest.raises(ValueError, match=r"`rows.counts` has shape \[1\]"):
        call(rows=rows._replace(counts=rows.counts[:1]))
    with pytest.raises(ValueError, match="3 heads of `key` do not divide the 2 heads"):
        call([inputs[0][:, :, :1].repeat(1, 1, 3, 1)] * 2 + inputs[2:])
    with pytest.raises(ValueError, match="`states` has strides"):
        call(states=layer.states.mT.contiguous().mT)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 8, 32, 64])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)])
def test_sizes_of_models(
    nodes: int, channels: bool, dtype: torch.dtype, dims: tuple[int, int], device: torch.device
) -> None:
    heads = (8, 8) if channels else (8, 4)
    run(Case(nodes=nodes, heads=heads, dims=dims, channels=channels, dtype=dtype, chain=nodes == 64), device)
