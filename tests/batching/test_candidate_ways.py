"""Drawn or best tokens in captured steps of "auto"."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from typing import Any

import pytest
from support.device_steps import Steps, install
from support.exact import SIGNIFICANCE, Fit, fit
from support.sampling import a_block_head, expected_tokens, sampled_tokens, the_target

from hf_specdec import DraftTree, DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.drafters import BlockDrafter
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.tree_choice import TreeChoices
from hf_specdec.trees import AutoTree
from hf_specdec.trees.auto_learning import Acceptances
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.trees.candidate_ways import CandidateWays
from hf_specdec.trees.capture_budget import CaptureBudget


TREE = TokenTree.parse("[(0,), (1,), (0,0)]")
OTHER = TokenTree.chain(3)
CAUGHT = 1e-6


def share_of_best(
    chance_drawn: float, chance_best: float, with_best: set[TokenTree], captures: CaptureBudget | None = None
) -> float:
    """The share of best tokens in 400 steps of a chain, of which the first token is accepted with these chances."""
    ways, generator, taken = CandidateWays(Acceptances(AutoTree()), with_best), random.Random(0), []
    ways.captures = captures
    for _ in range(400):
        ways.begin_step(OTHER)
        taken.append(ways.takes_best)
        is_hit = generator.random() < (chance_best if ways.takes_best else chance_drawn)
        ways.present.add_whole(OTHER, [[1] if is_hit else []])
    return sum(taken) / len(taken)


def test_what_is_accepted_more_often_is_taken() -> None:
    with_best = set[TokenTree]()
    assert share_of_best(0.2, 0.8, with_best) > 0.8
    assert with_best == {OTHER}
    assert 0.0 < share_of_best(0.8, 0.2, with_best) < 0.1
    assert share_of_best(0.2, 0.8, set(), CaptureBudget()) == 0.0
    long = CaptureBudget()
    long.time = 100.0
    assert share_of_best(0.2, 0.8, set(), long) > 0.8 and long.spent_on_trials == long.cost


def test_trees_are_captured_twice_only_where_that_pays() -> None:
    """At first a single tree is, to compare both."""
    for gives_more in (False, True):
        ways = CandidateWays(Acceptances(AutoTree()), {OTHER})
        for tree in [TREE] * 40 + [OTHER] * 40 + [TREE] * 40:
            ways.begin_step(tree)
            ways.present.add_whole(tree, [[1] if ways.takes_best == gives_more else []])
        assert ways._with_best == ({OTHER, TREE} if gives_more else {OTHER})


def test_a_step_is_repeated_until_it_may_take_others() -> None:
    for may_capture in (True, False):
        ways = CandidateWays(Acceptances(AutoTree()), set())
        ways.may_capture = may_capture
        ways.begin_step(TREE)
        repeats = sum(itertools.takewhile(bool, (ways.begin_next(TREE) for _ in range(200))))
        assert repeats == (CandidateWays.AT_FIRST - 2 if may_capture else 200) and not ways.takes_best
        ways.begin_step(TREE)
        assert ways.takes_best == may_capture and ways.begin_next(TREE) != may_capture


def choices_of_calls() -> tuple[TreeChoices, AutoTree, CandidateChoice]:
    """The choices of an engine of calls whose trials are over, before a sampled step of one row."""
    choices, tree = TreeChoices(None, None, None, lambda: True), AutoTree(takes_either=True)
    autos = choices.autos
    autos.keep_captures_for(1)
    autos._draws, autos._filters, autos._batch_size = True, False, 1
    choice: Any = autos.of(tree)
    choice.times.are_complete = True
    return choices, tree, choice


def test_best_tokens_are_tried_in_a_later_call_if_not_in_the_first() -> None:
    """One tree is captured with them, once."""
    choices, asked, _ = choices_of_calls()
    for tree in (TREE, OTHER):
        ways: Any = choices.autos.ways_of(asked)
        for _ in range(40):
            ways.begin_step(tree)
            ways.present.add_whole(tree, [[] if ways.takes_best else [1]])
        choices.forget_texts()
        assert ways._with_best == {TREE}


def test_a_warm_up_forgets_no_advantage() -> None:
    """And keeps none of its own, which is of texts that nobody wrote."""
    choices, asked, choice = choices_of_calls()
    dynamic = DynamicTree(depth=2, top_k=2, num_nodes=4)
    choice.learning.add_dynamic(dynamic, [2])
    known = copy.deepcopy(choices.autos._advantages)
    with choices.always(dynamic):
        choice.learning.add_dynamic(dynamic, [0])
    choices.forget_texts()
    again: Any = choices.autos.of(asked)
    assert {tree: ratio.value for tree, ratio in again.learning._advantages.items()} == {
        tree: ratio.value for of_tree in known.values() for tree, ratio in of_tree.items()
    }
    assert again.learning._advantages


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Whole steps of one tree, with best tokens in every second one."""
    pytest.importorskip("triton", reason="the kernels need triton")
    turns = itertools.cycle((False, True))

    def begin_step(ways: CandidateWays, tree: TokenTree | None) -> None:
        ways.takes_best = next(turns)

    monkeypatch.setattr(CandidateChoice, "_chosen", lambda choice: TREE)
    monkeypatch.setattr(CandidateWays, "begin_step", begin_step)
    monkeypatch.setattr(CandidateWays, "begin_next", lambda ways, tree: False)
    return install(monkeypatch, with_kernel=True)


def fit_of_calls(draft: Any, rows: int = 1_000, **options: Any) -> Fit:
    config = SpeculativeConfig(tree="auto", cuda_graphs=True, **options)
    tokens = sampled_tokens(copy.deepcopy(the_target()).float(), draft, config, rows)
    return fit(tokens, expected_tokens("plain"))


@pytest.mark.slow
def test_samples_are_the_target_s(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, launch = [], InFlightStep.launch
    monkeypatch.setattr(InFlightStep, "launch", lambda step: (kinds.append(step.kind.draws), launch(step))[1])
    found = fit_of_calls(a_block_head("markov"))
    assert set(kinds) == {False, True} and steps.captures == 2
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.slow
def test_best_tokens_verified_as_if_drawn_are_caught(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = BlockDrafter.grow

    def claims_to_draw(drafter: BlockDrafter, *asked: Any, **limits: Any) -> DraftTree:
        return dataclasses.replace(
            grow(drafter, *asked, **limits), tokens=grow(drafter, *asked[:3]).tokens, valid=None
        )

    monkeypatch.setattr(BlockDrafter, "grow", claims_to_draw)
    found = fit_of_calls(a_block_head("dflash"), rows=2_000, verification="rejection")
    assert steps.captures == 1
    assert found.p_value < CAUGHT, found
