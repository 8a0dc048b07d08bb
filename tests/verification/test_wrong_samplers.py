"""
Wrong samplers, most of them seen in public code: each must fail the very tests that the right one passes, with the
same statistic and as many samples. At one node the bias of each is also enumerated exactly, so that it is known what
is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.exact import SIGNIFICANCE, Fit, fit
from support.sampling import METHODS, a_draft, error_of_p, fit_samples
from support.tables import (
    Draws,
    Rule,
    TableModel,
    by_rejection,
    fan,
    normalised,
    ordered_draws,
    ratio,
    recursive_rejection,
    token_law,
    walk,
)

from hf_specdec import SpeculativeConfig
from hf_specdec.drafters import growth
from hf_specdec.generation.rows import CallRow
from hf_specdec.trees import DraftTree, TokenTree
from hf_specdec.verification import TargetDistribution, Walk, choose, rejection, verifier


CAUGHT, RIGHT = 1e-6, 1e-3
VOCAB, CHILDREN = 16, 3
SAMPLES = 5_000
"""As in test_rejection."""


# ----------------------------------------------------------------------------------------- wrong tests of the children


@dataclass(frozen=True)
class SiblingTests:
    """
    How the children of a node are tested. The right way is all True.

    Args:
        updates_p: after a refusal p becomes the residual.
        removes_token: after a refusal the token is taken out of q.
        renormalises: … and the rest of q sums to 1 again.
        recovers_from_residual: what is drawn when all children are refused comes from the residual.
    """

    updates_p: bool = True
    removes_token: bool = True
    renormalises: bool = True
    recovers_from_residual: bool = True

    def rule(self, p: np.ndarray, q: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As a `Rule` of `token_law`; p and q are `[vocab]`, or `[draws, vocab]`, and -1 in `drawn` is no child."""
        p, q = (np.broadcast_to(one, (len(drawn), one.shape[-1])).copy() for one in (p, q))
        first_p, rest, acceptance = p, p, np.zeros(drawn.shape)
        for place, tokens in enumerate(drawn.T):
            counts, at = tokens[:, None] >= 0, np.maximum(tokens, 0)[:, None]
            passes = ratio(np.take_along_axis(p, at, 1), np.take_along_axis(q, at, 1))
            acceptance[:, place] = np.where(counts, passes, 0.0)[:, 0]
            rest = np.where(counts, normalised(np.maximum(p - q, 0.0), otherwise=p), rest)
            if self.updates_p:
                p = rest
            if self.removes_token:
                removed = q.copy()
                np.put_along_axis(removed, at, 0.0, axis=1)
                q = np.where(counts, normalised(removed, otherwise=removed) if self.renormalises else removed, q)
        return acceptance, rest if self.recovers_from_residual else first_p

    def try_children(
        self,
        p: torch.Tensor,
        draft: DraftTree,
        rows: list[int],
        walked: Walk,
        children: list[list[tuple[int, int]]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the place of the library's `_try_children`."""
        most = max(map(len, children))
        if most == 0:
            return torch.full((len(rows),), -1), p
        tokens = [[token for _, token in row] + [-1] * (most - len(row)) for row in children]
        scores = [
            draft.scores_of(row, walked.node(row)) if candidates else torch.zeros(p.shape[1])
            for row, candidates in zip(rows, children, strict=True)
        ]
        acceptance, rest = self.rule(p.numpy(), torch.stack(scores).double().softmax(-1).numpy(), np.array(tokens))
        passed = torch.rand(acceptance.shape).numpy() < acceptance
        return torch.from_numpy(np.where(passed.any(axis=1), passed.argmax(axis=1), -1)), torch.from_numpy(rest)


TESTS: dict[str, SiblingTests] = {
    "each child against the first p and q": SiblingTests(updates_p=False, removes_token=False),
    "p not updated between siblings": SiblingTests(updates_p=False),
    "q not renormalised": SiblingTests(renormalises=False),
    "recovered from p": SiblingTests(recovers_from_residual=False),
}


# ----------------------------------------------------------------------------------------------- wrong ways of drawing


_draw = growth.draw_without_replacement


def _best_tokens(scores: torch.Tensor, count: int, noise: None = None) -> tuple[torch.Tensor, torch.Tensor]:
    best = scores.topk(count, dim=-1)
    return best.indices, best.values > -torch.inf


def _best_of_more_draws(scores: torch.Tensor, count: int, noise: None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one more, and drops the least likely one; the others stay in their order."""
    tokens, drawable = _draw(scores, min(count + 1, scores.shape[-1]))
    kept = scores.gather(-1, tokens).topk(count, dim=-1).indices.sort(dim=-1).values
    return tokens.gather(-1, kept), drawable.gather(-1, kept)


def _without_the_first(scores: torch.Tensor, count: int, noise: None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank gap: the first draw is not among the children."""
    tokens, drawable = _draw(scores, count + 1)
    return tokens[..., 1:], drawable[..., 1:]


def _best_tokens_law(q: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.argsort(-q)[None, :count], np.ones(1)


def _best_of_more_draws_law(q: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    drawn, probability = ordered_draws(q, min(count + 1, len(q)))
    kept = np.sort(np.argsort(-q[drawn], axis=1)[:, :count], axis=1)
    return np.take_along_axis(drawn, kept, axis=1), probability


def _without_the_first_law(q: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    drawn, probability = ordered_draws(q, count + 1)
    return drawn[:, 1:], probability


DRAWS: dict[str, tuple[Callable, Draws]] = {
    "p/q tests on the best tokens": (_best_tokens, _best_tokens_law),
    "unlikely draws dropped": (_best_of_more_draws, _best_of_more_draws_law),
    "second draw only": (_without_the_first, _without_the_first_law),
}
WAYS = ("right", *TESTS, *DRAWS)


def _put_in(way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Rule, Draws]:
    """Puts a way into the library's place; gives its law."""
    if way in TESTS:
        monkeypatch.setattr(rejection, "_try_children", TESTS[way].try_children)
        return TESTS[way].rule, ordered_draws
    if way in DRAWS:
        draw, law = DRAWS[way]
        monkeypatch.setattr(growth.drawing, "draw_without_replacement", draw)
        return recursive_rejection, law
    return recursive_rejection, ordered_draws


# --------------------------------------------------------------------------------------------------------- at one node


def _normal(sharpness: float, seed: int) -> torch.Tensor:
    return sharpness * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def _fit_one_node(p: torch.Tensor, q: torch.Tensor, count: int, law: np.ndarray | None = None) -> Fit:
    draft = TableModel(q.expand(1, VOCAB, VOCAB)).grow(fan(count), SAMPLES)
    walked = walk(draft, p.expand(SAMPLES, count + 1, -1), by_rejection)
    tokens = torch.tensor([text[0] for text in walked.tokens])
    return fit(tokens, p.double().softmax(-1) if law is None else torch.from_numpy(law))


P_SCORES, Q_SCORES = _normal(1.0, seed=7), _normal(4.0, seed=107)


def _bias(rule: Rule, draws: Draws = ordered_draws, count: int = CHILDREN) -> float:
    """The exact total variation between what comes out and p."""
    p, q = (scores.double().softmax(-1).numpy() for scores in (P_SCORES, Q_SCORES))
    return float(np.abs(token_law(p, q, count, rule, draws)[0] - p).sum() / 2)


def test_the_right_way_passes_at_one_node():
    assert _fit_one_node(P_SCORES, Q_SCORES, CHILDREN).p_value > RIGHT
    assert _bias(recursive_rejection) < 1e-12


def test_the_right_way_passes_when_told_in_the_wrong_ones_place(monkeypatch: pytest.MonkeyPatch):
    """What the wrong tests of the children are written with is right if nothing is left out."""
    monkeypatch.setattr(rejection, "_try_children", SiblingTests().try_children)
    assert _fit_one_node(P_SCORES, Q_SCORES, CHILDREN).p_value > RIGHT
    assert _bias(SiblingTests().rule) < 1e-12


@pytest.mark.parametrize("way", [*TESTS, *DRAWS])
def test_a_wrong_way_is_caught_at_one_node(way: str, monkeypatch: pytest.MonkeyPatch):
    rule, draws = _put_in(way, monkeypatch)
    found = _fit_one_node(P_SCORES, Q_SCORES, CHILDREN)
    assert found.p_value < CAUGHT, found
    # It is wrong in the way it is meant to be: the samples fit its own law.
    p, q = (scores.double().softmax(-1).numpy() for scores in (P_SCORES, Q_SCORES))
    law, _ = token_law(p, q, CHILDREN, rule, draws)
    assert _fit_one_node(P_SCORES, Q_SCORES, CHILDREN, law).p_value > SIGNIFICANCE
    assert found.total_variation == pytest.approx(_bias(rule, draws), abs=0.02)


def test_large_biases():
    """
    16 tokens, 3 children. Siblings drawn without replacement, but tested as if they were the only child, are the
    worst.
    """
    assert _bias(TESTS["each child against the first p and q"].rule) == pytest.approx(0.557, abs=0.001)
    assert _bias(TESTS["p not updated between siblings"].rule) == pytest.approx(0.314, abs=0.001)


def test_a_bias_too_small_to_be_found_is_not_found():
    """The other side of the statistic's power: it does not fail for nothing."""
    p = P_SCORES.double().softmax(-1)
    shifted = (1 - 0.005) * p + 0.005 * Q_SCORES.double().softmax(-1)
    tokens = torch.multinomial(shifted, SAMPLES, replacement=True)
    assert fit(tokens, p).p_value > SIGNIFICANCE


# ---------------------------------------------------------------------------------------------------- a tree re-ranked


def _keep_the_best(drafts: DraftTree, tree: TokenTree, count: int) -> None:
    """What EAGLE-2 does to its candidates, done to drawn ones: only the `count` likeliest nodes of the tree stay."""
    log_q = drafts.scores.log_softmax(dim=-1)
    sums = [torch.zeros(len(drafts.tokens))]
    for node in range(1, tree.num_nodes + 1):
        above = tree.parents[node]
        of_node = log_q[:, drafts.score_index[0][above]].gather(1, drafts.tokens[:, node - 1 : node])[:, 0]
        sums.append(sums[above] + of_node)
    best = torch.stack(sums[1:], dim=1).topk(count, dim=1).indices
    drafts.valid = torch.zeros_like(drafts.valid).scatter(1, best, True)


@pytest.mark.parametrize("keep", [15, 6], ids=["right", "wrong"])
def test_a_drawn_tree_that_is_re_ranked_is_caught(keep: int):
    target, draft = (TableModel.random(3, 8, 1.5, seed) for seed in (20, 21))
    tree = TokenTree.from_branching((3, 4))
    drafts = draft.grow(tree, SAMPLES)
    _keep_the_best(drafts, tree, keep)
    texts = target.finish(walk(drafts, target.score(drafts), by_rejection).tokens, 3)
    found = fit(texts, target.joint(3))
    assert found.p_value > RIGHT if keep == tree.num_nodes else found.p_value < CAUGHT, found


# -------------------------------------------------------------------------------------------------- through `generate`


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_way_is_caught_in_generate(way: str, monkeypatch: pytest.MonkeyPatch):
    """With four children, so that there are enough siblings to go wrong."""
    _put_in(way, monkeypatch)
    config = SpeculativeConfig(tree=TokenTree.from_branching((4, 2)))
    found = fit_samples(config, a_draft("noisy"), "plain")
    assert found.p_value > RIGHT if way == "right" else found.p_value < CAUGHT, found


class _RawBonus:
    """A target distribution that forgets the processors where a path is accepted to its end."""

    def __init__(self, target: TargetDistribution, draft: DraftTree):
        self.target, self.draft, self.reads_ahead = target, draft, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def scores(self, rows: list[int], walked: Walk) -> torch.Tensor:
        scores = self.target.scores(rows, walked)
        for place, row in enumerate(rows):
            node = walked.node(row)
            if node and not self.draft.topology.children_of(row, node):
                scores[place] = self.target._logits[row, node]
        return scores

    def choose(self, rows: list[int], walked: Walk, do_sample: bool) -> list[int]:
        return choose(self.scores(rows, walked), do_sample).tolist()


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("setting", ["temperature", "top-p"])
@pytest.mark.parametrize("verification", ["rejection", "target"])
def test_a_bonus_token_from_unwarped_logits_is_caught(
    verification: str, setting: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
):
    """With chains of one, so that there are many bonus tokens."""
    walks = {"rejection": "walk_by_rejection", "target": "walk_target"}
    right = getattr(verifier, walks[verification])

    def with_raw_bonus(draft: DraftTree, target: TargetDistribution, rows: list[int], *options: bool) -> Walk:
        return right(draft, _RawBonus(target, draft), rows, *options)

    if wrong:
        monkeypatch.setattr(verifier, walks[verification], with_raw_bonus)
    config = SpeculativeConfig(tree=TokenTree.chain(1), verification=verification)
    found = fit_samples(config, a_draft("noisy"), setting)
    assert found.p_value < CAUGHT if wrong else found.p_value > RIGHT, found


def _committed(row: CallRow, length: int, new: list[int]) -> torch.Tensor:
    """The history of a row without its path."""
    return row._call.sequences.row(row.row, length - len(new))


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("setting", ["strong repetition", "custom", "no repeated pair"])
def test_penalties_on_the_committed_text_alone_are_caught(setting: str, wrong: bool, monkeypatch: pytest.MonkeyPatch):
    if wrong:
        monkeypatch.setattr(CallRow, "history", _committed)
    found = fit_samples(METHODS["rejection, irregular"], a_draft("noisy"), setting)
    assert found.p_value < CAUGHT if wrong else found.p_value > RIGHT, found


def test_weak_penalties_on_the_committed_text_alone_are_seen_in_p(monkeypatch: pytest.MonkeyPatch):
    """The usual 1.3 hardly shows in the samples of this target, but in the distributions that they were drawn from."""
    monkeypatch.setattr(CallRow, "history", _committed)
    for padded in (False, True):
        assert error_of_p(METHODS["rejection, irregular"], a_draft("noisy"), "repetition", padded) > 1e-3
