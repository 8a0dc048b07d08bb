"""Calls that replay recorded texts: what a head accepted at each position is known, step times are given."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_specdec.trees import AutoTree, DraftTree, DynamicTree, Remembered, TokenTree, Topology
from hf_specdec.trees.auto_choice import AutoChoice
from hf_specdec.trees.step_times import StepTimes

from .simulated import CPU, Machine


FOLDER = Path(__file__).parent.parent / "goldens" / "auto"
FIRST = DynamicTree(depth=4, top_k=3, num_nodes=9)
"""The head's own tree."""
FIXED: dict[str, TokenTree | DynamicTree] = {
    "dynamic:4,3,9": FIRST,
    "chain:3": TokenTree.chain(3),
    "chain:5": TokenTree.chain(5),
    "branching:4,2,1": TokenTree.from_branching((4, 2, 1)),
}
"""The trees that `benchmarks/auto_speed.py` compares with."""
PRIOR = (0.759, 0.742, 0.734, 0.729, 0.723, 0.718, 0.712)
"""The head's agreement on held-out texts."""
Tree = TokenTree | DynamicTree | None


@dataclass(frozen=True, eq=False)
class Text:
    """
    What was recorded of a text, at each of its positions: the ranks of the next tokens among the draft's best tokens
    (-1: beyond those it knows), or in the order in which they were drawn; of the head's own tree each node's parent,
    and the accepted nodes.
    """

    best: list[list[int]]
    drawn: list[list[int]]
    dynamic: list[tuple[list[int], list[int]]]
    dynamic_drawn: list[tuple[list[int], list[int]]]

    @property
    def draws(self) -> bool:
        """Whether the text was sampled."""
        return bool(self.drawn)

    def __len__(self) -> int:
        return len(self.best)

    def drafted(self, tree: Tree, position: int, takes_best: bool = True) -> tuple[DraftTree, list[int]]:
        """The draft of a step at a position, and the accepted nodes."""
        room = len(self) - position
        takes_best = takes_best or not self.draws
        if isinstance(tree, DynamicTree):
            parents, path = (self.dynamic if takes_best else self.dynamic_drawn)[position]
            return _draft_of_parents(tuple(parents)).within([room]), path[:room]
        cut = None if tree is None else tree.truncate(room)
        if cut is None:
            return DraftTree.empty(1, CPU), []
        ranks, path, node = (self.best if takes_best else self.drawn)[position], list[int](), 0
        for rank in ranks[: cut.depth]:
            children = {cut.ranks[child]: child for child in cut.children[node]}
            if rank not in children:
                break
            node = children[rank]
            path.append(node)
        return _draft_of_tree(cut), path


@cache
def _draft_of_tree(tree: TokenTree) -> DraftTree:
    return DraftTree(torch.zeros(1, tree.num_nodes, dtype=torch.long), Topology.of_tree(tree, CPU))


@cache
def _draft_of_parents(parents: tuple[int, ...]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    topology = Topology.of_parents(torch.tensor([parents]), max(depths))
    return DraftTree(torch.zeros(1, len(parents) - 1, dtype=torch.long), topology)


def step_time(machine: Machine, tree: Tree, draft: DraftTree) -> tuple[float, float]:
    """Milliseconds of drafting and of the rest of a step; a dynamic tree takes longer to grow."""
    drafting = machine.level * draft.topology.depth * (1.2 if isinstance(tree, DynamicTree) else 1.0)
    return drafting, machine.forward(draft.num_nodes)


def fixed_call(machine: Machine, text: Text, tree: Tree) -> float:
    """Milliseconds of a text with always the same tree; static ones draw their tokens in sampled texts."""
    position, cost = 0, 0.0
    while position < len(text):
        draft, path = text.drafted(tree, position, takes_best=isinstance(tree, DynamicTree))
        cost += sum(step_time(machine, tree, draft))
        position += len(path) + 1
    return cost


@dataclass
class Process:
    """Calls with nothing asked, one after the other, which share step times and what they remember of acceptance."""

    machine: Machine
    draws: bool
    seed: int = 0
    new_choice: Callable[..., Any] = AutoChoice
    times: StepTimes = field(default_factory=StepTimes)
    remembered: Remembered = field(default_factory=Remembered)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def call(
        self, text: Text, tell: Callable[[int, Tree, int], None] = lambda position, tree, accepted: None
    ) -> float:
        """Milliseconds of a call; `tell` gets every step's position, tree and number of accepted tokens."""
        limits = AutoTree(first=FIRST, prior=PRIOR, takes_either=self.draws)
        choice = self.new_choice(self.times, limits, len(text) + 1, self.remembered)
        position, cost = 0, 0.0
        while position < len(text):
            tree = choice.begin_step(10 + position)
            draft, path = text.drafted(tree, position, choice.takes_best)
            seconds = step_time(self.machine, tree, draft)
            choice.end_step(draft, [path], *(self.machine.measured(one, self.random) for one in seconds))
            tell(position, tree, len(path))
            position, cost = position + len(path) + 1, cost + sum(seconds)
        return cost


@dataclass
class Bars:
    """By prompt, medians over the turns: calls with nothing asked over plain ones, and over the best tree if ahead."""

    plain: dict[str, float]
    best: dict[str, float]
    first: float


def bars_of(process: Process, texts: dict[str, Sequence[Text]], turns: int = 5) -> Bars:
    """Runs a first turn and `turns` later ones over all prompts, as `benchmarks/auto_speed.py` does."""
    machine, seconds, names = process.machine, dict[str, list[float]](), list(texts)
    plain, fixed = dict[str, list[float]](), dict[tuple[str, str], list[float]]()
    first = 0.0
    for turn in range(turns + 1):
        for name in names:
            text = texts[name][turn % len(texts[name])]
            own, without = process.call(text), fixed_call(machine, text, None)
            if turn == 0 and name == names[0]:
                first = without / own
                continue
            seconds.setdefault(name, []).append(own)
            plain.setdefault(name, []).append(without / own)
            for tree_name, tree in FIXED.items():
                fixed.setdefault((name, tree_name), []).append(fixed_call(machine, text, tree) / own)
    over = {name: statistics.median(plain[name]) for name in names}
    best = {name: min(statistics.median(fixed[name, tree]) for tree in FIXED) for name in names}
    return Bars(over, {name: share for name, share in best.items() if share < over[name]}, first)


@cache
def texts_of(temperature: int) -> dict[str, list[Text]]:
    """By prompt the recorded texts."""
    found = json.loads((FOLDER / f"temperature_{temperature}.json").read_text())
    return {name: [Text(**text) for text in texts] for name, texts in found.items()}
