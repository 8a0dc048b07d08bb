"""The recurrence of Mamba-2 over a tree, in Triton against a state for each node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from state_cases import NUM_SLOTS, OF_STATES, TOLERANCE, Tree, close, delta_pending, in_double, rows_of

from hf_specdec_kernels import tree_ssd
from hf_specdec_kernels.tree_ssd import commit_ssd_naive, tree_ssd_naive
from hf_specdec_kernels.tree_ssd.triton import launch_commit_ssd, launch_tree_ssd


@dataclass(frozen=True)
class Case:
    nodes: int = 9
    slots: tuple[int, ...] = (3, 0)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (24, 20)  # of states and heads
    dtype: torch.dtype = torch.float32
    chain: bool = False
    options: bool = True  # D, bias of dt, softplus, limits
    parts: int | None = None

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        (heads, groups), (state_size, head_dim) = self.heads, self.dims
        sizes = (heads * head_dim, groups * state_size, groups * state_size)
        mixed = torch.randn(len(self.slots), self.nodes, sum(sizes)).to(device, self.dtype)  # a convolution's output
        split = zip(mixed.split(sizes, 2), (head_dim, state_size, state_size), strict=True)
        x, keys, queries = (part.unflatten(2, (-1, dim)) for part, dim in split)
        dt = torch.randn(len(self.slots), self.nodes, heads).to(device, self.dtype)
        return [x, dt if self.options else dt.abs(), -3 * torch.rand(heads, device=device), keys, queries]

    def constants(self, device: torch.device) -> tuple:
        if not self.options:
            return (None, None, False, 0.0, float("inf"))
        skip, bias = torch.randn(2, self.heads[0]).to(device)
        return (skip.to(self.dtype), bias, True, 0.01, 1.5)


CASES = {
    "plain": Case(),
    "one node": Case(nodes=1, options=False, heads=(1, 1)),
    "a chain of one group": Case(nodes=40, chain=True, heads=(2, 1), slots=(4,)),
    "float16 in parts": Case(dtype=torch.float16, parts=2, dims=(16, 40), slots=(1,), heads=(1, 1)),
    "a row without a slot": Case(slots=(-1, 2), nodes=5, heads=(1, 1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_naive(case: Case, device: torch.device) -> None:
    """Two steps: from a state that was written, and after a path of each row; then a commit."""
    run(case, device)


def run(case: Case, device: torch.device) -> None:
    (heads, _), (state_size, head_dim) = case.heads, case.dims
    states = torch.randn(NUM_SLOTS, heads, head_dim, state_size).to(device)
    pending = delta_pending(case.nodes + 3, case.heads, case.dims, case.dtype, device)
    turns = torch.tensor([0, 1, 5, 2, 4]).to(device)
    expected, constants, tree = in_double((states, *pending)), case.constants(device), None
    tolerance = OF_STATES[case.dtype]
    for counts in ((0, 0), (4, 1)):
        rows, inputs = rows_of(tree, case.slots, counts, turns), case.inputs(device)
        tree = Tree(len(case.slots), case.nodes, device, case.chain)
        common = (tree.ancestors, *rows, *constants)
        out = torch.full(inputs[0].shape, torch.nan).to(inputs[0])
        launch_tree_ssd(*inputs, states, *pending, *common, out, case.parts)
        close(out, tree_ssd_naive(*in_double(inputs), *expected, *common), TOLERANCE[case.dtype])
        check(states, pending, expected, tolerance)
        turns[rows.slots[rows.slots >= 0]] += 1
    rows = rows_of(tree, case.slots, (1, 5), turns)
    launch_commit_ssd(states, *pending, *rows)
    commit_ssd_naive(*expected, *rows)
    check(states, pending, expected, tolerance)


def check(states: torch.Tensor, pending: tuple, expected: list[torch.Tensor], tolerance: float) -> None:
    for found, wanted in zip((states, *pending), expected, strict=True):
        close(found, wanted, tolerance)


def test_what_is_not_a_number_stays_where_it_is(device: torch.device) -> None:
    """A void node reaches no other nodes but those below it, and no state that it is not kept for."""
    case = Case(nodes=12, slots=(1,), heads=(1, 1))
    tree, inputs, constants = Tree(1, 12, device), case.inputs(device), case.constants(device)
    leaf = next(node for node in range(1, 12) if node not in tree.parents[0])
    others = [node for node in range(12) if node != leaf]
    found = []
    for void in (False, True):
        for tensor in (*inputs[:2], *inputs[3:]):
            tensor[0, leaf] = torch.nan if void else tensor[0, leaf]
        states = torch.ones(NUM_SLOTS, 1, 20, 24, device=device)
        pending = delta_pending(12, case.heads, case.dims, case.dtype, device)
        rows = rows_of(None, (1,), (0,), torch.zeros(NUM_SLOTS, dtype=torch.long, device=device))
        out = torch.full(inputs[0].shape, torch.nan).to(inputs[0])
        launch_tree_ssd(*inputs, states, *pending, tree.ancestors, *rows, *constants, out)
        kept = rows_of(tree, (1,), (3,), torch.ones(NUM_SLOTS, dtype=torch.long, device=device))
        launch_commit_ssd(states, *pending, *kept._replace(counts=kept.counts * 0 + 1))
        found.append((out[0, others], states))
    for with_void, without in zip(*found, strict=True):
        assert torch.equal(with_void, without)


def test_refusals(device: torch.device) -> None:
    case = Case()
    x, dt, rates, keys, queries = case.inputs(device)
    states = torch.zeros(NUM_SLOTS, 4, 20, 24, device=device)
    pending = delta_pending(9, case.heads, case.dims, case.dtype, device)
    rows = rows_of(None, case.slots, (0, 0), torch.zeros(NUM_SLOTS, dtype=torch.long, device=device))
    ancestors = Tree(2, 9, device).ancestors
    assert tree_ssd(x, dt, rates, keys, queries, states, pending, ancestors, rows).shape == x.shape
    with pytest.raises(ValueError, match=r"`states` has shape \[5, 4, 24, 20\]; it must be \[any, 4, 20, 24\]"):
        tree_ssd(x, dt, rates, keys, queries, states.mT, pending, ancestors, rows)
    with pytest.raises(TypeError, match="`A` has dtype torch.float16"):
        tree_ssd(x, dt, rates.half(), keys, queries, states, pending, ancestors, rows)
    with pytest.raises(ValueError, match="`ancestors` has shape"):
        tree_ssd(x, dt, rates, keys, queries, states, pending, ancestors[:, :8], rows)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(128, 64), (256, 64)])
def test_sizes_of_models(nodes: int, dtype: torch.dtype, dims: tuple[int, int], device: torch.device) -> None:
    run(replace(Case(heads=(16, 1)), nodes=nodes, dims=dims, dtype=dtype, chain=nodes == 64), device)
