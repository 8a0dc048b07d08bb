"""`tree="auto"` with a draft that estimates its own acceptance, on a simulated machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
from support.simulated import CPU, LIMITS, Machine, acceptance, mean, simulated_step

from hf_specdec.trees import DraftTree, TokenTree
from hf_specdec.trees.auto_choice import AutoChoice
from hf_specdec.trees.auto_learning import Trust
from hf_specdec.trees.step_times import StepTimes


MACHINE = Machine(((0, 42.0), (9, 110.0), (15, 150.0), (63, 480.0)), level=0.3)
DRAFTING = 4.0
"""Time of a block's forward, whatever the tree."""
Tell = Callable[[float, random.Random], float]
TELLS: dict[str, Tell] = {
    "right": lambda best, random: best,
    "right but too sure": lambda best, random: min(1.5 * best, 1.0),
    "blind": lambda best, random: random.uniform(0.0, 1.0),
    "contrary": lambda best, random: 1.0 - best,
    "sure of all": lambda best, random: 1.0,
    "sure of nothing": lambda best, random: 0.0,
}


def call(times: StepTimes, tell: Tell | None, seed: int, max_new_tokens: int = 160) -> tuple[float, float]:
    """Milliseconds per token of a call whose steps are hard or easy, and accepted tokens per draft token."""
    generator, hints = random.Random(seed), random.Random(seed + 1)
    choice = AutoChoice(times, LIMITS, max_new_tokens)
    tokens, cost, accepted, nodes = 0, 0.0, 0, 0
    while tokens < max_new_tokens:
        best = generator.choice([0.15, 0.9])
        tree, drafting = choice.begin_step(10 + tokens), 0.0
        if tree is not None:
            drafting = DRAFTING
            if tell is not None:
                tree = choice.refine({0: [tell(best, hints) for _ in range(tree.depth + 2)]})
        assert tree is None or isinstance(tree, TokenTree)
        draft, path = DraftTree.empty(1, CPU), list[int]()
        if tree is not None:
            draft, path = simulated_step(tree, acceptance(best), generator)
        drafting += MACHINE.level * draft.topology.depth
        verifying = MACHINE.forward(draft.num_nodes)
        choice.end_step(draft, [path], MACHINE.measured(drafting, generator), MACHINE.measured(verifying, generator))
        tokens, cost = tokens + len(path) + 1, cost + drafting + verifying
        accepted, nodes = accepted + len(path), nodes + draft.num_nodes
    return cost / tokens, accepted / max(nodes, 1)


@cache
def calls(tell: Tell | None) -> tuple[float, float]:
    """The means of the later calls of a process."""
    times = StepTimes()
    found = [call(times, tell, seed) for seed in range(16)][4:]
    return mean([cost for cost, _ in found]), mean([share for _, share in found])


FAST = ("right", "contrary", "sure of nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TELLS]
)
def test_estimates_help_where_they_are_right_and_cost_little_where_not(name: str) -> None:
    (without, share_without), (cost, share) = calls(None), calls(TELLS[name])
    if name.startswith("right"):
        assert cost < 0.95 * without and share > 1.1 * share_without
    else:
        assert cost < 1.03 * without


def test_trust_follows_what_comes_true() -> None:
    generator, learnt = random.Random(3), [[0.5, 0.2], [0.5, 0.2]]
    right, wrong = Trust(), Trust()
    for _ in range(60):
        chance = generator.choice([0.1, 0.9])
        is_hit = generator.random() < chance
        right.learn(chance, 0.5, is_hit)
        wrong.learn(1.0 - chance, 0.5, is_hit)
    assert right.share > 0.9 and wrong.share < 0.1
    (sure, _), unknown = right.chances([0.9], learnt)
    assert sure > 0.8 and unknown == learnt[1]  # what is not told stays as it was learnt
    for told in (0.0, 0.5, 1.0):
        level = right.chances([told], learnt)[0]
        assert 0.0 < sum(level) <= 1.0 and level == sorted(level, reverse=True)


def test_no_tree_may_be_taken_once_a_draft_has_told() -> None:
    """The step then counts as one that lost the time of drafting, which is no time of a step without a tree."""
    times = StepTimes()
    for nodes, seconds in ((0, 42.0), (1, 60.0), (8, 110.0)):
        for _ in range(3):
            times.add(None if nodes == 0 else TokenTree.chain(nodes), nodes, nodes, 4.0 if nodes else 0.0, seconds)
    choice = AutoChoice(times, LIMITS)
    choice._trials, choice._way.trust._log_odds, choice.losses.lost = [], 4.0, -3.0
    assert choice.begin_step(10) is not None
    assert choice.refine({0: [0.0, 0.0, 0.0]}) is None
    choice.end_step(DraftTree.empty(1, CPU), [[]], 4.0, 42.0)
    assert times.propose.up_to(0)[0] == 0.0 and choice.losses.lost > -3.0 + 0.05
