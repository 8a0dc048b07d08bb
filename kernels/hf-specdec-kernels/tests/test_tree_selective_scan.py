"""The selective scan of Mamba-1 over a tree, in Triton against plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from state_cases import NUM_SLOTS, OF_STATES, TOLERANCE, Tree, close, in_double, never_written, rows_of

from hf_specdec_kernels import ScanPending, tree_selective_scan
from hf_specdec_kernels.tree_selective_scan import commit_selective_scan_naive, tree_selective_scan_naive
from hf_specdec_kernels.tree_selective_scan.triton import launch_commit_selective_scan, launch_tree_selective_scan


@dataclass(frozen=True)
class Case:
    nodes: int = 7
    slots: tuple[int, ...] = (3,)
    channels: int = 34
    state_size: int = 16
    groups: int = 1
    dtype: torch.dtype = torch.float32
    chain: bool = False
    options: bool = True  # D, z, bias of dt, softplus

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        shape = (len(self.slots), self.nodes)
        x, dt = (torch.randn(shape[0], self.channels, shape[1]).to(device, self.dtype).mT for _ in range(2))
        keys, queries = (torch.randn(*shape, self.groups, self.state_size).to(device, self.dtype) for _ in range(2))
        rates = -3 * torch.rand(self.channels, self.state_size, device=device)
        return [x, dt if self.options else dt.abs(), rates, keys, queries]

    def constants(self, device: torch.device) -> list:
        if not self.options:
            return [None, None, None, False]
        skip, bias = torch.randn(2, self.channels).to(device)
        gate = torch.randn(len(self.slots), self.nodes, self.channels).to(device, self.dtype)
        return [skip.to(self.dtype), gate, bias, True]

    def pending(self, device: torch.device) -> ScanPending:
        capacity = self.nodes + 2
        return ScanPending(
            never_written(NUM_SLOTS, capacity, self.channels, dtype=self.dtype, device=device),
            never_written(NUM_SLOTS, capacity, self.channels, dtype=torch.float32, device=device),
            never_written(2, NUM_SLOTS, capacity, self.groups, self.state_size, dtype=self.dtype, device=device),
        )


CASES = {
    "plain": Case(slots=(3, 0), nodes=5),
    "one node": Case(nodes=1, options=False),
    "a chain": Case(nodes=12, chain=True, slots=(4,), channels=20),
    "groups": Case(groups=3, channels=48, state_size=12, dtype=torch.float16, slots=(-1, 2), nodes=4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_naive(case: Case, device: torch.device) -> None:
    """Two steps: from a state that was written, and after a path of each row; then a commit."""
    run(case, device)


def run(case: Case, device: torch.device) -> None:
    states, pending = torch.randn(NUM_SLOTS, case.channels, case.state_size).to(device), case.pending(device)
    turns = torch.tensor([0, 1, 5, 2, 4]).to(device)
    expected, tree, rates = in_double((states, *pending)), None, None
    for counts in ((0, 0), (4, 1)):
        rows, inputs, constants = rows_of(tree, case.slots, counts, turns), case.inputs(device), case.constants(device)
        rates = inputs[2] = inputs[2] if rates is None else rates
        tree = Tree(len(case.slots), case.nodes, device, case.chain)
        out = torch.full(inputs[0].shape, torch.nan).to(inputs[0])
        launch_tree_selective_scan(*inputs, states, *pending, tree.ancestors, *rows, *constants, out)
        wanted = tree_selective_scan_naive(*in_double(inputs), *expected, tree.ancestors, *rows, *constants)
        close(out, wanted, TOLERANCE[case.dtype])
        check(states, pending, expected)
        turns[rows.slots[rows.slots >= 0]] += 1
    rows = rows_of(tree, case.slots, (1, 5), turns)
    launch_commit_selective_scan(states, *pending, rates, *rows)
    commit_selective_scan_naive(*expected, rates, *rows)
    check(states, pending, expected)


def check(states: torch.Tensor, pending: tuple, expected: list[torch.Tensor]) -> None:
    for found, wanted in zip((states, *pending), expected, strict=True):
        close(found, wanted, OF_STATES[pending[0].dtype])


def test_void_nodes_and_refusals(device: torch.device) -> None:
    """A void node reaches no other nodes but those below it, and no state that it is not kept for."""
    case = Case(nodes=12, slots=(1,), options=False)
    tree, (x, dt, rates, keys, queries) = Tree(1, 12, device), case.inputs(device)
    leaf = next(node for node in range(1, 12) if node not in tree.parents[0])
    states, pending = torch.zeros(NUM_SLOTS, 34, 16, device=device), case.pending(device)
    rows = rows_of(None, (1,), (0,), torch.zeros(NUM_SLOTS, dtype=torch.long, device=device))
    found = []
    for void in (False, True):
        for tensor in (x, dt, keys):
            tensor[0, leaf] = torch.nan if void else tensor[0, leaf]
        out = torch.full(x.shape, torch.nan).to(x)
        common = (tree.ancestors, *rows, None, None, None, False)
        launch_tree_selective_scan(x, dt, rates, keys, queries, states, *pending, *common, out)
        found.append(out[0, [node for node in range(12) if node != leaf]])
    assert torch.equal(*found) and not states.any()
    assert tree_selective_scan(x, dt, rates, keys, queries, states, pending, tree.ancestors, rows).shape == x.shape
    with pytest.raises(ValueError, match=r"`A` has shape \[33, 16\]"):
        tree_selective_scan(x, dt, rates[1:], keys, queries, states, pending, tree.ancestors, rows)
    with pytest.raises(ValueError, match="a last dimension of 65"):
        wide = states.new_zeros(5, 34, 65)
        keys = keys.new_zeros(1, 12, 1, 65)
        tree_selective_scan(x, dt, rates, keys, keys, wide, pending, tree.ancestors, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2])
def test_sizes_of_models(nodes: int, dtype: torch.dtype, groups: int, device: torch.device) -> None:
    run(Case(nodes=nodes, dtype=dtype, groups=groups, channels=4096, chain=nodes == 64), device)
