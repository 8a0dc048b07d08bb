"""`tree="auto"` where trees may be filled with drawn tokens or with the best ones: it takes what accepts more."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.simulated import CPU, LIMITS, Machine, acceptance, mean, simulated_step

from hf_specdec.config import SpeculativeConfig
from hf_specdec.plan import SpeculationPlan
from hf_specdec.trees import AutoTree, DraftTree, TokenTree
from hf_specdec.trees.auto_choice import AutoChoice
from hf_specdec.trees.step_times import StepTimes


MACHINE = Machine(((0, 42.0), (9, 110.0), (15, 150.0), (63, 480.0)), level=0.3)


def call(limits: AutoTree, times: StepTimes, drawn: float, best: float, seed: int) -> tuple[float, float]:
    """Milliseconds per token, and the share of drafts with best tokens, whose acceptance is that of `best`."""
    generator, tokens, cost, ways = random.Random(seed), 0, 0.0, [0, 0]
    choice = AutoChoice(times, limits, 160)
    while tokens < 160:
        tree = choice.begin_step(10 + tokens)
        draft, path, drafting = DraftTree.empty(1, CPU), list[int](), 0.0
        if tree is not None:
            assert isinstance(tree, TokenTree)
            ways[choice.takes_best] += 1
            draft, path = simulated_step(tree, acceptance(best if choice.takes_best else drawn), generator)
            drafting = 4.0 + MACHINE.level * tree.depth
        verifying = MACHINE.forward(draft.num_nodes)
        choice.end_step(draft, [path], MACHINE.measured(drafting, generator), MACHINE.measured(verifying, generator))
        tokens, cost = tokens + len(path) + 1, cost + drafting + verifying
    return cost / tokens, ways[1] / max(sum(ways), 1)


def calls(limits: AutoTree, drawn: float, best: float) -> tuple[float, float]:
    times = StepTimes()
    found = [call(limits, times, drawn, best, seed) for seed in range(12)][4:]
    return mean([cost for cost, _ in found]), mean([share for _, share in found])


@pytest.mark.slow
@pytest.mark.parametrize("drawn, best", [(0.85, 0.5), (0.5, 0.85), (0.7, 0.7)])
def test_the_better_way_is_taken(drawn: float, best: float) -> None:
    either = replace(LIMITS, takes_either=True)
    least = min(calls(LIMITS, drawn, drawn)[0], calls(LIMITS, best, best)[0])
    cost, share = calls(either, drawn, best)
    assert cost < 1.12 * least
    if drawn != best:
        assert (share > 0.6) if best > drawn else (share < 0.4)


def test_where_both_are_candidates() -> None:
    options = {"has_probabilities": True, "vocab_size": 100, "default_tree": TokenTree.chain(4), "reads_noise": True}

    def takes_either(do_sample: bool = True, on_cpu: bool = True, **config: str) -> bool:
        config = {"tree": "auto"} | config
        plan = SpeculationPlan.resolve(SpeculativeConfig(**config), **options, do_sample=do_sample, on_cpu=on_cpu)
        assert isinstance(plan.tree, AutoTree)
        return plan.tree.takes_either

    assert takes_either() and takes_either(on_cpu=False)
    assert not takes_either(do_sample=False)
    for asked in ({"draft_sampling": "sample"}, {"draft_sampling": "greedy"}):
        assert not takes_either(**asked)
    for asked in ({"verification": "rejection"}, {"verification": "target"}):
        assert not takes_either(**asked)
