"""Calls without a model: step times and acceptance are given, and what `tree="auto"` chooses is counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from hf_specdec.trees import AutoTree, DraftTree, TokenTree, Topology
from hf_specdec.trees.auto_choice import AutoChoice
from hf_specdec.trees.auto_tables import likeliest_paths
from hf_specdec.trees.step_times import StepTimes


CPU = torch.device("cpu")
LIMITS = AutoTree(max_nodes=32)


def simulated_step(
    tree: TokenTree, chances: list[list[float]], generator: random.Random
) -> tuple[DraftTree, list[int]]:
    """A draft whose child of rank r at depth d is right with that chance, and the path that is accepted."""
    path, node = [], 0
    while tree.children[node]:
        draw, level = generator.random(), chances[len(path)]
        for child in tree.children[node]:
            draw -= level[tree.ranks[child]] if tree.ranks[child] < len(level) else 0.0
            if draw < 0:
                path.append(child)
                node = child
                break
        else:
            break
    return _empty_draft(tree), path


@cache
def _empty_draft(tree: TokenTree) -> DraftTree:
    return DraftTree(torch.zeros(1, tree.num_nodes, dtype=torch.long), Topology.of_tree(tree, CPU))


@dataclass(frozen=True)
class Machine:
    """
    Step times in ms.

    Args:
        points (`tuple`): pairs of a number of draft nodes and the time of a forward, between which it is linear.
        level (`float`): time of drafting a level.
        noise (`float`): largest relative error of a measurement.
    """

    points: tuple[tuple[int, float], ...]
    level: float
    noise: float = 0.02

    def forward(self, nodes: int) -> float:
        """Time of a forward of the root and `nodes` draft nodes."""
        for (low, start), (high, end) in zip(self.points, self.points[1:], strict=False):
            if nodes <= high or (high, end) == self.points[-1]:
                return start + (end - start) * (nodes - low) / (high - low)
        return self.points[0][1]

    def step(self, tree: TokenTree | None) -> float:
        """Time of a step with a tree."""
        return self.forward(0) if tree is None else self.forward(tree.num_nodes) + self.level * tree.depth

    def measured(self, milliseconds: float, generator: random.Random) -> float:
        """A noisy measurement."""
        return milliseconds * (1.0 + self.noise * generator.uniform(-1.0, 1.0))


def acceptance(best: float) -> list[list[float]]:
    """Chances `[depth][rank]` of a draft whose best token is right that often."""
    return [[best, *(share * (1.0 - best) for share in (0.3, 0.12, 0.08))]] * 8


def simulated_call(
    times: StepTimes,
    machine: Machine,
    chances: list[list[float]],
    seed: int,
    max_new_tokens: int = 96,
    limits: AutoTree = LIMITS,
    trees: Callable[[TokenTree | None], None] = lambda tree: None,
) -> float:
    """Milliseconds per token that a call takes; `trees` is told the tree of every step."""
    generator, tokens, cost = random.Random(seed), 0, 0.0
    choice = AutoChoice(times, limits, max_new_tokens)
    while tokens < max_new_tokens:
        tree = choice.begin_step(10 + tokens)
        assert tree is None or isinstance(tree, TokenTree)
        trees(tree)
        draft, path = DraftTree.empty(1, CPU), list[int]()
        if tree is not None:
            draft, path = simulated_step(tree, chances, generator)
        propose = machine.measured(machine.level * draft.topology.depth, generator)
        choice.end_step(draft, [path], propose, machine.measured(machine.forward(draft.num_nodes), generator))
        tokens, cost = tokens + len(path) + 1, cost + machine.step(tree)
    return cost / tokens


@cache
def fixed_trees() -> list[TokenTree]:
    """Trees that people use: chains, and the likeliest paths of a usual draft."""
    usual = acceptance(0.6)
    found = [TokenTree.chain(length) for length in range(1, 9)]
    for size in (9, 15, 31):
        found.append(TokenTree([path for _, path in likeliest_paths(usual, size, 5)]))
    return found


def best_fixed(machine: Machine, chances: list[list[float]]) -> float:
    """Expected milliseconds per token with the best of `fixed_trees`, or without a tree."""
    return min(machine.step(tree) / expected_tokens(tree, chances) for tree in (None, *fixed_trees()))


def expected_tokens(tree: TokenTree | None, chances: list[list[float]]) -> float:
    """Expected tokens of a step with a tree."""
    found = {(): 1.0}
    for path in () if tree is None else tree.paths:
        level = chances[len(path) - 1]
        found[path] = found[path[:-1]] * (level[path[-1]] if path[-1] < len(level) else 0.0)
    return sum(found.values())


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)
