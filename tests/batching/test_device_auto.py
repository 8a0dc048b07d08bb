"""`tree="auto"` in whole steps of requests in flight, with a stand-in for CUDA's graphs."""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.models import noisy_copy, tiny_model
from support.sampling import a_head, the_target

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.engine.captured import StepRunner
from hf_specdec.engine.captured.keys import StepKey, StepKind, StepSize
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.trees.auto import AutoTree, Plan
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.trees.candidate_trees import CandidateTrees
from hf_specdec.trees.capture_budget import CaptureBudget
from hf_specdec.trees.whole_times import WholeTimes
from hf_specdec.verification import Verifier


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)
CHAIN = TokenTree.chain(2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.mark.slow
@pytest.mark.parametrize("others", [CHAIN, DYNAMIC], ids=["static", "dynamic"])
def test_auto_beside_a_request_with_a_tree_of_its_own(others: Any) -> None:
    """It plans, and rows that were not drafted for count as no refusals."""
    target = tiny_model(dtype=torch.float32)
    draft = copy.deepcopy(target)
    with target.init_continuous_batching(
        assistant_model=draft, tree="auto", continuous_batching_config=limits()
    ) as manager:
        names = [manager.add_request([4, 5, 6], max_new_tokens=120, **own) for own in ({}, {"tree": others})]
        for name in names:
            assert manager.get_result(name, timeout=120).error is None
        choices = manager.engine.choices
        assert all(tables.of().chances()[0][0] > 0.9 for tables in choices.autos._acceptance.values())
        of_two = [choice for (_, (_, size, _), _), choice in choices.autos._auto.items() if size == 2]
        assert of_two and all(choice.times.are_known for choice in of_two)


@pytest.mark.slow
def test_auto_takes_few_trees(runs: list[InFlightStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a graph of its own, even where captures cost nothing."""
    monkeypatch.setattr(CandidateChoice, "_may_take", lambda self, tree: True)
    target = tiny_model(dtype=torch.float32)
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree="auto", continuous_batching_config=limits()
    ) as manager:
        for _ in range(3):
            manager.add_request([4, 5, 6], max_new_tokens=100)
            manager.get_result(timeout=60)
        kinds = {kind.tree for kind, _ in manager.engine.device_steps.stored}
    assert 1 < len(kinds) <= len(CandidateTrees(AutoTree()).trees) + 2 and len(runs) > 40


@pytest.mark.slow
@pytest.mark.usefixtures("few_trees")
def test_auto_captures_nothing_once_it_is_warm(
    runs: list[InFlightStep], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it changes to, however far a head is behind, and however long prompts are."""
    target = copy.deepcopy(the_target()).float()
    manager = target.init_continuous_batching(
        assistant_model=copy.deepcopy(a_head(None)).float(),
        tree="auto",
        continuous_batching_config=limits(80, max_requests_per_batch=2, max_batch_tokens=64),
    )
    manager.warmup(at_once=True)
    with manager:
        manager.get_result(manager.add_request([4, 5, 6], max_new_tokens=2), timeout=300)
        captures, choice = stand_in.captures, random.Random(0)
        candidates = [None, *CandidateTrees(AutoTree()).trees]
        monkeypatch.setattr(CandidateChoice, "begin_step", lambda self, *_: choice.choice(candidates))
        prompts = ragged_prompts((5, 27, 49, 71))
        prompts = [[token % target.config.vocab_size for token in prompt] for prompt in prompts]
        for prompt in prompts:
            manager.add_request(prompt, max_new_tokens=25)
        for _ in prompts:
            output = manager.get_result(timeout=120)
            assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=25)
    assert stand_in.captures == captures
    assert len({step.kind.tree for step in runs[-40:]}) > 3


@pytest.mark.slow
def test_probes_of_auto_carry_their_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is further behind by then than the probe is deep: it reads first, and the probe comes one step later."""
    monkeypatch.setattr(CandidateChoice, "plan", lambda self, **_: Plan(None, 1.0))
    monkeypatch.setattr(CandidateChoice, "worth", lambda self, tree: float(tree is None))
    monkeypatch.setattr(CandidateChoice, "BUDGET", 1.0)
    monkeypatch.setattr(CaptureBudget, "allows", lambda *_: True)  # what reads has graphs of its own
    monkeypatch.setattr(CandidateChoice, "_worth_a_look", lambda self: None)
    carried, run = [], StepRunner.run

    def noted(self: StepRunner, requests: Any, groups: Any, goes_on: Any) -> Any:
        outcome = None
        for outcome in run(self, requests, groups, goes_on):
            if not outcome.left_out:
                carried.append("-" if not groups else "tree" if outcome.drafted else "reads")
            yield outcome
        if outcome is None:
            carried.append("-" if not groups else "tree")

    monkeypatch.setattr(StepRunner, "run", noted)
    told, end_step = [], CandidateChoice.end_whole_step

    def end_noted(self: CandidateChoice, tree: Any, paths: Any, seconds: Any, only_read: bool, *rest: Any) -> None:
        told.append(only_read)
        end_step(self, tree, paths, seconds, only_read, *rest)

    monkeypatch.setattr(CandidateChoice, "end_whole_step", end_noted)
    target, head = trained_target(), trained_head()
    manager = target.init_continuous_batching(
        assistant_model=head, tree="auto", continuous_batching_config=limits(400, max_requests_per_batch=2)
    )
    prompt = trained_prompts()["prompts"][0]
    with manager:
        output = manager.get_result(manager.add_request(prompt, max_new_tokens=200), timeout=100)
    assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=200)
    assert carried.count("reads") > 2 and told.count(True) >= carried.count("reads")
    assert all(carried[step + 1] == "tree" for step, what in enumerate(carried[:-1]) if what == "reads")


@pytest.mark.slow
@pytest.mark.usefixtures("few_trees")
def test_auto_within_a_budget_and_beside_other_trees(
    runs: list[InFlightStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses among the trees that are within each row's share; those of a schedule are captured as they are."""
    monkeypatch.setattr(WholeTimes, "of", lambda self, tree: 1.0)
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.02)
    manager = target.init_continuous_batching(
        assistant_model=draft,
        speculative_config=SpeculativeConfig(tree=[(0, "auto"), (40, DYNAMIC)], max_step_nodes=12),
        continuous_batching_config=limits(400, max_requests_per_batch=2),
    )
    manager.warmup(at_once=True)
    with warnings.catch_warnings(), manager:
        warnings.simplefilter("error")
        manager.get_result(manager.add_request([4, 5, 6], max_new_tokens=2), timeout=300)
        first = len(runs)
        for prompt in ([4, 5, 6], [7, 8]):
            manager.add_request(prompt, max_new_tokens=60)
        for _ in range(2):
            output = manager.get_result(timeout=120)
            assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=60)
    trees = [step.kind.tree for step in runs[first:] if step.kind.tree is not None]
    limits_of_auto = AutoTree(first=TokenTree.chain(5))  # the tree of a draft model
    candidates, sizes = CandidateTrees(limits_of_auto).trees, {tree.num_nodes for tree in trees}
    assert max(sizes) <= 12 and any(isinstance(tree, DynamicTree) for tree in trees)
    assert all(tree in candidates for tree in trees if isinstance(tree, TokenTree)) and len(sizes) > 1


@pytest.mark.parametrize("other", [{}, {"has_grammars": True}, {"draws": True}, {"best": 0}], ids=str)
def test_trees_for_which_nothing_is_captured(other: dict[str, Any]) -> None:
    """A graph of another kind, as one for rows with a grammar, is none for requests without; nor one that is small."""
    target = tiny_model(dtype=torch.float32)
    manager = target.init_continuous_batching(
        assistant_model=copy.deepcopy(target), tree="auto", continuous_batching_config=limits()
    )
    steps, requests = manager.engine.device_steps, manager._admission.dummy_requests(1, False)
    size = StepSize.of(requests, 2, 3, steps.fewest_blocks, steps.fewest_rows)
    kind = StepKind(CHAIN, frozenset({Verifier.GREEDY}), **other)
    steps.stored.add(StepKey(kind, size), Any)  # type: ignore[arg-type]
    assert steps.ready_trees(requests) == (frozenset() if other else {CHAIN})
    steps.stored.clear()
    steps.stored.add(StepKey(kind, replace(size, blocks=1)), Any)  # type: ignore[arg-type]
    assert steps.ready_trees(requests) == frozenset()


@pytest.mark.slow
def test_auto_learns_of_sampled_steps_apart(runs: list[InFlightStep]) -> None:
    """They accept less: what greedy ones accept is not believed of them, nor the other way round."""
    target = tiny_model(dtype=torch.float32)
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree="auto", continuous_batching_config=limits()
    ) as manager:
        acceptance, found = manager.engine.choices.autos._acceptance, []
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 3.0}):
            manager.get_result(manager.add_request([4, 5, 6], max_new_tokens=100, **options), timeout=120)
            found.append({draws: tables.of().chances() for (_, draws), tables in acceptance.items()})
    assert found[0].keys() == {False} and found[1].keys() == {False, True}
    assert found[0][False] == found[1][False] != found[1][True]
