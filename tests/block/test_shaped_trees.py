"""Captured steps of "auto" that shape their trees by a head's confidence."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from support.batches import ragged_prompts, text_alone
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, Fit, fit
from support.heads import CONFIDENCE_KINDS, tiny_block_head
from support.models import prompts, tiny_model
from support.parity import plain_text
from support.sampling import expected_tokens, sampled_tokens, the_target
from transformers import PreTrainedModel

from hf_specdec import DraftTree, SpeculativeConfig, TokenTree, Topology
from hf_specdec.drafters.growth import LikeliestNodes
from hf_specdec.trees.auto_learning import Trust
from hf_specdec.trees.auto_tables import AcceptanceTable, likeliest_paths
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.trees.confidence import RowOutcome, calibrated_chances, wide_tree


CPU = torch.device("cpu")
CAUGHT = 1e-6
TREE = TokenTree.parse("[(0,), (1,), (0,0), (0,1)]")
CHAIN = TokenTree.chain(3)


def some_chances(seed: int, depth: int, ranks: int) -> torch.Tensor:
    generator = random.Random(seed)
    best = tuple(generator.uniform(0.1, 0.95) for _ in range(depth))
    return torch.tensor(AcceptanceTable(depth, ranks, best).chances())


def test_the_likeliest_nodes_of_a_wide_tree() -> None:
    """They are those of all trees as large, where the wide tree has them, with their tokens and places of scores."""
    wide = TokenTree.from_branching((4, 4, 4))
    nodes = torch.arange(1, wide.num_nodes + 1)[None].expand(3, -1)
    index = torch.arange(wide.num_nodes + 1)[None]
    draft = DraftTree(nodes, Topology.of_tree(wide, CPU), nodes % 2 == 0, nodes[..., None].float(), index)
    chances = torch.stack([some_chances(seed, 3, 4) for seed in range(3)])
    found = LikeliestNodes(wide, 9, 4, CPU).of(draft, chances)
    for row in range(3):
        expected = TokenTree(tuple(path for _, path in likeliest_paths(chances[row].tolist(), 9, 3)))
        assert [wide.paths[node - 1] for node in found.tokens[row].tolist()] == list(expected.paths)
        assert found.topology.parents[row].tolist() == [max(parent, 0) for parent in expected.parents]
        assert found.valid[row].tolist() == [node % 2 == 0 for node in found.tokens[row].tolist()]
        assert found.score_index[row].tolist() == [0, *found.tokens[row].tolist()]


@pytest.mark.parametrize("tree", [TokenTree.chain(8), TREE, TokenTree.from_branching((4, 2, 1))])
def test_wide_trees_hold_good_trees_for_any_draft(tree: TokenTree) -> None:
    wide = wide_tree(tree, 8)
    assert set(tree.paths) <= set(wide.paths) and wide.depth == tree.depth and not wide.has_rank_gaps
    assert wide.num_nodes <= 2 * tree.num_nodes


def test_chances_are_those_of_the_host() -> None:
    trust, learnt = Trust(), some_chances(5, 3, 4)
    for is_hit in (True, False, True):
        trust.learn(0.9, 0.4, is_hit)
    confidences = torch.tensor([[0.9, 0.2, 0.5], [0.0, 1.0, 0.4]])
    found = calibrated_chances(confidences, learnt, torch.tensor(trust.share), torch.tensor(trust.factor))
    for row in range(2):
        torch.testing.assert_close(found[row], torch.tensor(trust.chances(confidences[row].tolist(), learnt.tolist())))
    assert (found[..., 1:] <= found[..., :-1] + 1e-7).all()


def test_what_was_not_drafted_does_not_count() -> None:
    table, same = AcceptanceTable(3, 4), AcceptanceTable(3, 4)
    table.add_offered([([1], [2, 0])])
    same.add_whole(TokenTree.parse("[(0,), (1,)]"), [[2]])
    assert table.chances() == same.chances()


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[RowOutcome]:
    """What came of steps, all of which take `TREE`, or a chain now and then."""
    found: list[RowOutcome] = []
    goes_on = itertools.cycle((True, False))
    end_whole_step = CandidateChoice.end_whole_step

    def noted(self: CandidateChoice, tree: Any, paths: Any, seconds: Any, only_read: bool, its: Any) -> None:
        found.extend(its)
        end_whole_step(self, tree, paths, seconds, only_read, its)

    def chosen(self: CandidateChoice) -> TokenTree:
        self._step += 1
        self.learning.renew()
        return CHAIN if self._step % 3 == 0 else TREE

    monkeypatch.setattr(CandidateChoice, "_chosen", chosen)
    monkeypatch.setattr(CandidateChoice, "begin_next", lambda self: next(goes_on))
    monkeypatch.setattr(CandidateChoice, "end_whole_step", noted)
    return found


def a_target() -> PreTrainedModel:
    return tiny_model("llama", seed=1, dtype=torch.float32)


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
@pytest.mark.some_cases(1)
def test_greedy_texts_are_plain(kind: str, outcomes: list[RowOutcome], steps: Steps) -> None:
    target = a_target()
    head, inputs = tiny_block_head(target, **CONFIDENCE_KINDS[kind]), prompts(3, 9, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=24)
    config = SpeculativeConfig(tree="auto", cuda_graphs=True)
    text = target.generate(
        **inputs, do_sample=False, max_new_tokens=24, pad_token_id=0, assistant_model=head, speculative_config=config
    )
    assert text.tolist() == expected.tolist()
    assert steps.captures == 2 and steps.replays > 4
    assert len({row.offered[0] for row in outcomes}) > 1  # trees differ from row to row
    assert all(0.0 < chance < 1.0 for row in outcomes for chance in row.chances)


def test_requests(outcomes: list[RowOutcome], steps: Steps) -> None:
    target, batch = a_target(), ragged_prompts((5, 9, 2))
    head = tiny_block_head(target, **CONFIDENCE_KINDS["markov"])
    outputs = target.generate_batch(batch, max_new_tokens=20, do_sample=False, assistant_model=head, tree="auto")
    assert outcomes and steps.replays > 4
    for prompt, output in zip(batch, outputs.values(), strict=True):
        assert output.error is None and output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)


def of_whole_steps(kind: str, rows: int = 1_000, **settings: Any) -> Fit:
    """How well first tokens of whole steps fit."""
    config = SpeculativeConfig(tree="auto", cuda_graphs=True, **settings)
    head = tiny_block_head(the_target(), **CONFIDENCE_KINDS[kind])
    tokens = sampled_tokens(copy.deepcopy(the_target()).float(), head, config, rows)
    return fit(tokens, expected_tokens("plain"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, settings",
    [
        ("markov", {}),
        ("markov", {"verification": "rejection"}),
        ("plain", {}),
        ("rnn", {"draft_sampling": "greedy"}),
    ],
    ids=str,
)
def test_samples_are_the_target_s(
    kind: str, settings: dict[str, Any], outcomes: list[RowOutcome], steps: Steps
) -> None:
    found = of_whole_steps(kind, **settings)
    assert len({row.offered[0] for row in outcomes}) > 1 and any(row.ranks for row in outcomes)
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.slow
def test_nodes_chosen_by_their_own_tokens_do_not_fit(monkeypatch: pytest.MonkeyPatch, steps: Steps) -> None:
    """Of two nodes, the root's second child stays for some of its tokens alone."""
    of = LikeliestNodes.of

    def wrong(self: LikeliestNodes, draft: DraftTree, chances: torch.Tensor) -> Any:
        assert self.wide.paths == ((0,), (1,), (0, 0))
        wants_second = draft.tokens[:, 1, None] < 3
        chances[:, 1, 0] = 0.3
        chances[:, 0, 1:2] = torch.where(wants_second, 0.9, 0.1) * chances[:, 0, :1]
        return of(self, draft, chances)

    monkeypatch.setattr(CandidateChoice, "_chosen", lambda self: TokenTree.chain(2))
    monkeypatch.setattr(LikeliestNodes, "of", wrong)
    assert of_whole_steps("markov", rows=2_000, verification="rejection").p_value < CAUGHT
