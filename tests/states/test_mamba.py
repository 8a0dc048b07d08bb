"""Mamba-2 and Mamba-1 over trees, beside a state per node that transformers' one-token functions update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.jamba.modeling_jamba import mamba_selective_scan, mamba_selective_state_update

from hf_specdec.states import NodeTopology, Path
from hf_specdec.states.mamba1 import Mamba1
from hf_specdec.states.mamba2 import Mamba2


BATCH, NODES = 3, 13
HEADS, HEAD_DIM, GROUPS, STATE = 6, 5, 2, 7
CHANNELS = 11
MAMBA1, MAMBA2 = Mamba1(), Mamba2()


def random_parents(seed: int, nodes: int = NODES) -> torch.Tensor:
    """The parents of an irregular tree per row, in no order but that parents come first; -1 for the root's."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, nodes)] for _ in range(BATCH)
    ]
    return torch.tensor(rows)


def ancestors_of(parents: torch.Tensor) -> torch.Tensor:
    ancestors = torch.eye(parents.shape[1], dtype=torch.bool).repeat(len(parents), 1, 1)
    for row, above in enumerate(parents.tolist()):
        for node, parent in enumerate(above):
            if parent >= 0:
                ancestors[row, node] |= ancestors[row, parent]
    return ancestors


def path_of(parents: torch.Tensor, last: list[int | None]) -> Path:
    """Paths from the root to a node of every row; None keeps nothing."""
    paths = []
    for row, node in enumerate(last):
        path: list[int] = []
        while node is not None and node >= 0:
            path.insert(0, node)
            node = int(parents[row, node])
        paths.append(path)
    return Path.of(paths, torch.device("cpu"))


class Inputs:
    """Random inputs of both kinds, in the layouts of a mixer, `dt` after its softplus."""

    def __init__(self, seed: int, nodes: int = NODES):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.x2, self.dt2 = normal(BATCH, nodes, HEADS, HEAD_DIM), normal(BATCH, nodes, HEADS).exp()
        self.B2, self.C2 = normal(BATCH, nodes, GROUPS, STATE), normal(BATCH, nodes, GROUPS, STATE)
        self.A2, self.state2 = -normal(HEADS).exp(), normal(BATCH, HEADS, HEAD_DIM, STATE)
        self.x1, self.dt1 = normal(BATCH, nodes, CHANNELS), normal(BATCH, nodes, CHANNELS).exp()
        self.B1, self.C1 = normal(BATCH, nodes, STATE), normal(BATCH, nodes, STATE)
        self.A1, self.state1 = -normal(CHANNELS, STATE).exp(), normal(BATCH, CHANNELS, STATE)

    def updated2(self, state: torch.Tensor, node: int) -> torch.Tensor:
        """What node reads by transformers' own function, which updates `state` in place."""
        A = self.A2[:, None, None].expand(-1, HEAD_DIM, STATE)
        dt = self.dt2[:, node, :, None].expand(-1, -1, HEAD_DIM)
        return mamba2_selective_state_update(state, self.x2[:, node], dt, A, self.B2[:, node], self.C2[:, node])

    def updated1(self, state: torch.Tensor, node: int) -> torch.Tensor:
        inputs = self.x1, self.dt1, self.B1, self.C1
        x, dt, B, C = (values[:, node] for values in inputs)
        return mamba_selective_state_update(state, x, dt, self.A1, B, C)


def per_node(
    state: torch.Tensor, parents: torch.Tensor, update: Callable[[torch.Tensor, int], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A state for every node, made of that of its parent: `[batch, nodes, …]`, beside what each node reads."""
    states, outputs = [], []
    for node in range(parents.shape[1]):
        above = [states[parent][row] if parent >= 0 else state[row] for row, parent in enumerate(parents[:, node])]
        states.append(torch.stack(above))
        outputs.append(update(states[-1], node))
    return torch.stack(outputs, 1), torch.stack(states, 1)


def scored(kind: str, inputs: Inputs, parents: torch.Tensor, first: int = 0, earlier: Any = None) -> Any:
    """What the nodes from `first` on read, by the functions' own layouts, and what is kept of them."""
    topology = NodeTopology(ancestors_of(parents)[:, first:])
    if kind == "mamba2":
        taken = (values[:, first:] for values in (inputs.x2, inputs.dt2, inputs.B2, inputs.C2))
        x, dt, B, C = taken
        made = MAMBA2.inputs(x, dt, inputs.A2, B, C, chunk_size=8)
        return MAMBA2.score(inputs.state2, made, earlier, topology)
    taken = (values[:, first:].transpose(1, 2) for values in (inputs.x1, inputs.dt1, inputs.B1, inputs.C1))
    x, dt, B, C = taken
    return MAMBA1.score(inputs.state1, MAMBA1.inputs(x, dt, inputs.A1, B, C), earlier, topology)


def reference(kind: str, inputs: Inputs, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "mamba2":
        return per_node(inputs.state2, parents, inputs.updated2)
    return per_node(inputs.state1, parents, inputs.updated1)


def committed(kind: str, inputs: Inputs, kept: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    of_path = {name: path.of_nodes(values) for name, values in kept.items()}
    if kind == "mamba2":
        return MAMBA2.advance(inputs.state2, of_path, path.is_on)
    return MAMBA1.advance(inputs.state1, of_path | {"A": inputs.A1}, path.is_on)


both = pytest.mark.parametrize("kind", ["mamba2", "mamba1"])


@both
@pytest.mark.parametrize("seed", range(4))
def test_trees(kind: str, seed: int) -> None:
    inputs, parents = Inputs(seed), random_parents(seed)
    outputs, _ = scored(kind, inputs, parents)
    torch.testing.assert_close(outputs, reference(kind, inputs, parents)[0], rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize("nodes", [1, 2, 40])
def test_chains(kind: str, nodes: int) -> None:
    inputs, parents = Inputs(5, nodes), torch.arange(-1, nodes - 1).repeat(BATCH, 1)
    outputs, _ = scored(kind, inputs, parents)
    torch.testing.assert_close(outputs, reference(kind, inputs, parents)[0], rtol=1e-4, atol=1e-4)


@both
def test_levels(kind: str) -> None:
    """A tree that is read in two forwards: the later nodes follow what was kept of the earlier ones."""
    inputs, parents = Inputs(3), random_parents(3)
    outputs, kept = scored(kind, inputs, parents)
    early = {name: values[:, :-4] for name, values in kept.items()}
    late_outputs, late = scored(kind, inputs, parents, first=NODES - 4, earlier=early)
    torch.testing.assert_close(late_outputs, outputs[:, -4:], rtol=1e-5, atol=1e-5)
    for name, values in late.items():
        torch.testing.assert_close(values, kept[name][:, -4:])


@both
def test_committed_paths(kind: str) -> None:
    inputs, parents = Inputs(0), random_parents(0)
    _, kept = scored(kind, inputs, parents)
    _, states = reference(kind, inputs, parents)
    for last in range(NODES):
        ends = [last, (last * 5) % NODES, 0]
        expected = states[torch.arange(BATCH), torch.tensor(ends)]
        after = committed(kind, inputs, kept, path_of(parents, [*ends]))
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


@both
def test_nodes_that_are_not_committed(kind: str) -> None:
    """A row that keeps nothing holds its state, whatever its nodes hold; NaN outside of a path stays there."""
    inputs, parents = Inputs(1), random_parents(1)
    _, states = reference(kind, inputs, parents)
    outside = next(node for node in range(1, NODES) if not ancestors_of(parents)[0, NODES - 1, node])
    for values in (inputs.x2, inputs.dt2, inputs.B2, inputs.x1, inputs.dt1, inputs.B1):
        values[0, outside] = values[1] = torch.nan
    _, kept = scored(kind, inputs, parents)
    after = committed(kind, inputs, kept, path_of(parents, [NODES - 1, None, NODES - 1]))
    state = inputs.state2 if kind == "mamba2" else inputs.state1
    assert after[1].equal(state[1])
    torch.testing.assert_close(after[[0, 2]], states[[0, 2], NODES - 1], rtol=1e-4, atol=1e-5)


def test_steps_are_bounded_in_prompts_alone() -> None:
    """As transformers reads them: its code for many tokens bounds dt, that for one token does not."""
    inputs, limits = Inputs(2), (0.5, 2.0)
    made = MAMBA2.inputs(inputs.x2, inputs.dt2, inputs.A2, inputs.B2, inputs.C2, chunk_size=8, dt_limit=limits)
    assert made["dt"].equal(inputs.dt2)
    is_prompt = torch.arange(NODES) < torch.tensor([[NODES], [4], [0]])
    bounded = MAMBA2.of_prompt(made, is_prompt)["dt"]
    assert bounded[0].equal(inputs.dt2[0].clamp(*limits))
    assert bounded[1, :4].equal(inputs.dt2[1, :4].clamp(*limits))
    assert bounded[1, 4:].equal(inputs.dt2[1, 4:]) and bounded[2].equal(inputs.dt2[2])


def test_all_that_a_mixer_hands_on() -> None:
    """Biases, softplus, D and the gate, beside transformers' functions for many tokens, from a zero state."""
    inputs, chain = Inputs(4), NodeTopology.chain(NODES, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    bias2, D2 = torch.randn(2, HEADS, generator=generator)
    arguments = inputs.x2, inputs.dt2 - 2, inputs.A2, inputs.B2, inputs.C2
    options = {"chunk_size": 8, "D": D2, "dt_bias": bias2, "dt_softplus": True}
    made = MAMBA2.inputs(*arguments, **options)
    outputs, _ = MAMBA2.score(MAMBA2.first_state(made), made, None, chain)
    torch.testing.assert_close(outputs, mamba2_chunk_scan(*arguments, **options), rtol=1e-4, atol=1e-5)
    bias1, D1 = torch.randn(2, CHANNELS, generator=generator)
    x, dt, B, C = (values.transpose(1, 2) for values in (inputs.x1, inputs.dt1 - 2, inputs.B1, inputs.C1))
    options = {"D": D1, "z": x.flip(2), "delta_bias": bias1, "delta_softplus": True, "return_last_state": True}
    made = MAMBA1.inputs(x, dt, inputs.A1, B, C, **options)
    outputs, kept = MAMBA1.score(MAMBA1.first_state(made), made, None, chain)
    whole = torch.ones(BATCH, NODES, dtype=torch.bool)
    last = MAMBA1.advance(MAMBA1.first_state(made), kept | {"A": inputs.A1}, whole)
    expected, expected_last = mamba_selective_scan(x, dt, inputs.A1, B, C, **options)
    torch.testing.assert_close(MAMBA1.returned(outputs, last)[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, expected_last, rtol=1e-4, atol=1e-5)
