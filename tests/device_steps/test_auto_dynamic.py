"""Dynamic trees under "auto" in captured steps: what is reported of them, when they are taken, exact texts."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from support.device_steps import Steps, install
from support.exact import SIGNIFICANCE, fit
from support.heads import tiny_head
from support.models import prompts, tiny_model
from support.parity import plain_text
from support.sampling import a_head, expected_tokens, sampled_tokens, the_target

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.engine.captured.reshaping import offered_columns, read_row_outcome
from hf_specdec.engine.tree_choice import _tree_of_ways
from hf_specdec.states.kernel import MOST_NODES
from hf_specdec.trees import AutoTree, Topology
from hf_specdec.trees.auto_learning import Ratio
from hf_specdec.trees.auto_tables import AcceptanceTable
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.trees.candidate_trees import CandidateTrees
from hf_specdec.trees.confidence import RowOutcome
from hf_specdec.trees.whole_times import WholeTimes


OWN = DynamicTree(depth=3, top_k=2, num_nodes=5)
STATIC = TokenTree.parse("[(0,), (1,), (0,0)]")


def test_what_was_offered_is_reported() -> None:
    """Of random trees and paths, as the tree itself says."""
    draws = random.Random(0)
    for _ in range(20):
        parents = [0, 0]
        parents += sorted(draws.randrange(node) for node in range(1, 7))
        usable = torch.tensor([[True] * 7 + [False]])
        topology = Topology.of_parents(torch.tensor([parents]), 7)
        path = [0]
        while children := [child for child in topology.children_of(0, path[-1]) if child < 7]:
            path.append(draws.choice(children))
        depth, accepted = 7, len(path) - 1
        padded = torch.tensor([path + [0] * (depth + 1 - len(path))])
        columns = offered_columns(padded, topology.parents, usable)[0].tolist()
        outcomes = read_row_outcome(columns, depth, accepted, has_confidence=False)
        below = [[child for child in topology.children_of(0, node) if child < 7] for node in path]
        assert outcomes.chances == [] and outcomes.offered == [len(children) for children in below]
        assert outcomes.ranks == [children.index(node) for children, node in zip(below, path[1:], strict=False)]


def test_candidates_have_the_drafter_s_own_tree() -> None:
    trees = CandidateTrees(AutoTree(first=OWN)).trees
    dynamic = [tree for tree in trees if isinstance(tree, DynamicTree)]
    assert dynamic[0] == OWN and dynamic[1].num_nodes == 4 * OWN.num_nodes
    assert not any(isinstance(tree, DynamicTree) for tree in CandidateTrees(AutoTree(first=STATIC)).trees)
    large = DynamicTree(depth=8, top_k=10, num_nodes=59)
    assert (
        max(tree.num_nodes for tree in CandidateTrees(AutoTree(first=large)).trees)
        == CandidateTrees.MOST_NODES
        < MOST_NODES
    )
    assert DynamicTree(depth=8, top_k=10, num_nodes=64) not in CandidateTrees(AutoTree(first=large)).trees
    narrow = AutoTree(first=OWN).within(3, 2)
    assert [tree for tree in CandidateTrees(narrow).trees if isinstance(tree, DynamicTree)][0] == OWN


def test_explorations_draw() -> None:
    """So that begun steps are not ended by what the planned ones take."""
    choice = CandidateChoice(WholeTimes(), AutoTree(), AcceptanceTable(8, 8))
    seen = set()
    for _ in range(20):
        tree = choice.begin_step(100)
        seen.add(tree is not None)
        assert choice.explores == (tree is not None) and _tree_of_ways(choice) is None
    assert seen == {True, False}


@pytest.mark.parametrize("is_better", [True, False])
def test_a_dynamic_tree_is_taken_where_it_accepts_more(is_better: bool) -> None:
    """Both kinds take the same time; a static one lacks the second child where it is right, or the other one depth."""
    limits, draws = AutoTree(first=OWN, max_nodes=5, max_depth=3, max_children=2), random.Random(1)
    times, advantages, taken = WholeTimes(), dict[DynamicTree, Ratio](), list[Any]()

    def ranks_of(tree: Any) -> list[int]:
        found: list[int] = []
        while len(found) < 3 and (draw := draws.random()) < 0.85:
            rank = 0 if draw < 0.6 else 1
            if isinstance(tree, DynamicTree) and not is_better and len(found) == 1:
                break
            if isinstance(tree, TokenTree) and (rank == 1 or (*found, rank) not in tree.paths):
                break
            found.append(rank)
        return found

    for _ in range(4):  # calls
        choice = CandidateChoice(times, limits, AcceptanceTable(3, 2), is_of_calls=True, advantages=advantages)
        for _ in range(150):
            tree: Any = choice.begin_step(100)
            rows = [] if tree is None else [ranks_of(tree) for _ in range(8)]
            offered = [2] * 4 if is_better else [2, 0]
            outcomes = (
                [RowOutcome([], offered[: len(row) + 1], row) for row in rows] if isinstance(tree, DynamicTree) else []
            )
            paths = rows
            if isinstance(tree, TokenTree):
                paths = [[tree.paths.index(tuple(row[:n])) + 1 for n in range(1, len(row) + 1)] for row in rows]
            choice.end_whole_step(tree, paths, 1.0 if tree is None else 1.1, outcomes=outcomes)
            taken.append(tree)
    share = sum(isinstance(tree, DynamicTree) for tree in taken[300:]) / 300
    assert share > 0.8 if is_better else share < 0.3


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Captured steps, of which every second takes the dynamic tree, and the others a static one."""
    pytest.importorskip("triton", reason="the kernels need triton")
    goes_on = itertools.cycle((True, False))

    def chosen(self: CandidateChoice) -> Any:
        self._step += 1
        return STATIC if self._step % 2 else OWN

    monkeypatch.setattr(CandidateChoice, "_chosen", chosen)
    monkeypatch.setattr(CandidateChoice, "begin_next", lambda self: next(goes_on))
    return install(monkeypatch, with_kernel=True)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[RowOutcome]:
    found: list[RowOutcome] = []
    end = CandidateChoice.end_whole_step

    def noted(self: CandidateChoice, tree: Any, paths: Any, seconds: Any, only_read: bool, its: Any) -> None:
        assert bool(its) <= isinstance(tree, DynamicTree)
        found.extend(its)
        assert [len(row.ranks) for row in its] in ([], [len(path) for path in paths if path is not None])
        end(self, tree, paths, seconds, only_read, its)

    monkeypatch.setattr(CandidateChoice, "end_whole_step", noted)
    return found


@pytest.mark.parametrize("path", ["generate", "generate_batch"])
@pytest.mark.some_cases(1)
def test_greedy_texts_are_plain(path: str, steps: Steps, outcomes: list[RowOutcome]) -> None:
    target = tiny_model("llama", seed=1, dtype=torch.float32)
    head, inputs = tiny_head(target, default_tree=OWN), prompts(3, 9)
    expected = plain_text(target, inputs, max_new_tokens=24)
    options = {"do_sample": False, "max_new_tokens": 24, "assistant_model": head}
    if path == "generate":
        config = SpeculativeConfig(tree="auto", cuda_graphs=True)
        text = target.generate(**inputs, **options, pad_token_id=0, speculative_config=config).tolist()
    else:
        outputs = target.generate_batch(inputs["input_ids"].tolist(), **options, tree="auto")
        text = [
            ids + output.generated_tokens
            for ids, output in zip(inputs["input_ids"].tolist(), outputs.values(), strict=True)
        ]
    assert text == expected.tolist()
    assert steps.replays > 4 and any(row.ranks for row in outcomes) and len({row.offered[0] for row in outcomes}) >= 1


@pytest.mark.slow
def test_samples_are_the_target_s(steps: Steps, outcomes: list[RowOutcome]) -> None:
    target = copy.deepcopy(the_target()).float()
    head = copy.deepcopy(a_head(None))
    head.config.default_tree = dataclasses.asdict(OWN)
    tokens = sampled_tokens(target, head, SpeculativeConfig(tree="auto", cuda_graphs=True), 1_000)
    found = fit(tokens, expected_tokens("plain"))
    assert any(row.ranks for row in outcomes) and found.p_value > SIGNIFICANCE, found
