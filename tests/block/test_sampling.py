"""
Sampled calls with block heads against the enumerated distribution: trees of best tokens verified by the target's own
draws, and drawn trees verified by recursive rejection, where every node draws its own list from the distribution given
its token.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, Fit, fit
from support.heads import BLOCK_KINDS
from support.sampling import METHODS, a_block_head, expected_tokens, fit_samples, sampled_tokens, the_target

from hf_specdec import SpeculativeConfig, last_metrics
from hf_specdec.drafters import BlockDrafter


BEST, RANKED, DRAWN, BUDGETS = "target, best tokens", "target, re-ranked", "rejection, irregular", "rejection, budgets"
CAUGHT = 1e-6


@pytest.mark.parametrize(
    "kind, method, setting",
    [
        ("dflash", BEST, "plain"),
        ("dflash", RANKED, "temperature"),
        ("dflash", DRAWN, "plain"),
        ("dflash", BUDGETS, "top-p"),
        ("causal", DRAWN, "top-k"),
        ("draft vocabulary", DRAWN, "plain"),
        ("markov", BEST, "plain"),
        ("markov", DRAWN, "plain"),
        ("markov", BUDGETS, "temperature"),
        ("markov, draft vocabulary", DRAWN, "temperature"),
        ("gated", DRAWN, "custom"),
        ("rnn", DRAWN, "plain"),
        ("rnn", BUDGETS, "plain"),
        ("dflash2", RANKED, "plain"),
        ("dflash2", DRAWN, "plain"),
        ("dflash2", BUDGETS, "top-k"),
        ("peagle", DRAWN, "plain"),
        ("peagle", BUDGETS, "plain"),
    ],
)
@pytest.mark.some_cases(3)
def test_calls(kind: str, method: str, setting: str) -> None:
    found = fit_samples(METHODS[method], a_block_head(kind), setting)
    assert found.p_value > SIGNIFICANCE, found
    assert last_metrics().num_accepted_tokens > 0


def of_whole_steps(kind: str, method: str) -> Fit:
    """How well first tokens of whole steps fit."""
    config = SpeculativeConfig(
        tree=METHODS[method].tree, draft_sampling=METHODS[method].draft_sampling, cuda_graphs=True
    )
    tokens = sampled_tokens(copy.deepcopy(the_target()).float(), a_block_head(kind), config, 1_000)
    return fit(tokens, expected_tokens("plain"))


WHOLE = {("dflash", BEST), ("dflash", BUDGETS), ("markov", DRAWN), ("rnn", BUDGETS), ("dflash2", DRAWN)}


@pytest.mark.parametrize(
    "kind, method",
    [
        pytest.param(*case, marks=() if case in WHOLE else pytest.mark.slow)
        for case in itertools.product(("dflash", "markov", "rnn", "dflash2"), (BEST, DRAWN, BUDGETS))
    ],
)
@pytest.mark.some_cases(1)
def test_whole_steps(kind: str, method: str, steps: Steps) -> None:
    found = of_whole_steps(kind, method)
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found


# ---------------------------------------------------------------------------------------------------------- wrong ways


class ScoredByPosition(BlockDrafter):
    """Draws the children of a node given its token, and says that they came from the position's logits."""

    def grow(self, tree: Any, root_logits: torch.Tensor, depth: int, warp: Any = None, *drawing: Any) -> Any:
        draft = super().grow(tree, root_logits, depth, warp, *drawing)
        level = draft.topology.depths.expand(len(draft.tokens), -1).clamp(max=self.all_logits.shape[1] - 1)
        index = draft.score_index.expand(len(draft.tokens), -1)
        scores = draft.scores.clone()
        for row, node in itertools.product(range(len(index)), range(index.shape[1])):
            if index[row, node] >= 0:
                scores[row, index[row, node]] = warp(self.all_logits[row, level[row, node]])
        draft.scores = scores
        return draft


@pytest.mark.slow
def test_the_positions_q_does_not_fit() -> None:
    """q is the distribution given the node's token, not that of the position alone."""
    found = fit_samples(METHODS[DRAWN], ScoredByPosition(a_block_head("markov")), "plain", rows=4_000)
    assert found.p_value < CAUGHT, found


def law_of_two(p: np.ndarray, q_root: np.ndarray, q_below: np.ndarray, shared: bool) -> np.ndarray:
    """
    The exact law `[vocab, vocab]` of two tokens drawn with two children of the root and one child of each of them,
    verified by recursive rejection. With `shared`, both children get the same token, drawn given the first child.
    """
    vocab, law = len(q_root), np.zeros((len(q_root),) * 2)

    def second(first: int, token: int, weight: float) -> None:
        accept = min(1.0, p[first, token] / q_below[first, token])
        residual = np.maximum(p[first] - q_below[first], 0.0)
        law[first, token] += weight * accept
        if accept < 1.0:
            law[first] += weight * (1.0 - accept) * residual / residual.sum()

    target = p.mean(axis=0)  # of the first token
    for a, b in itertools.permutations(range(vocab), 2):
        drawn = q_root[a] * q_root[b] / (1.0 - q_root[a])
        for of_a, of_b in itertools.product(range(vocab), repeat=2):
            weight = drawn * q_below[a, of_a] * ((of_a == of_b) if shared else q_below[b, of_b])
            if weight == 0.0:
                continue
            accept = min(1.0, target[a] / q_root[a])
            second(a, of_a, weight * accept)
            left, q = np.maximum(target - q_root, 0.0), np.where(np.arange(vocab) == a, 0.0, q_root)
            if accept == 1.0:
                continue
            left, q = left / left.sum(), q / q.sum()
            refused, also = weight * (1.0 - accept), min(1.0, left[b] / q[b])
            second(b, of_b, refused * also)
            if also < 1.0:
                rest = np.maximum(left - q, 0.0)
                law += (refused * (1.0 - also) * rest / rest.sum())[:, None] * p
    return law


def test_a_list_shared_by_parents_is_biased() -> None:
    """By enumeration: with q that depends on the node's token, every node must draw its own list."""
    random = np.random.default_rng(46)
    p, q_below, q_root = (random.dirichlet([0.5] * 3, size) for size in (3, 3, None))
    truth = p.mean(axis=0)[:, None] * p
    assert np.abs(law_of_two(p, q_root, q_below, shared=False) - truth).sum() / 2 < 1e-12
    assert np.abs(law_of_two(p, q_root, q_below, shared=True) - truth).sum() / 2 > 0.2


def test_all_kinds_are_named() -> None:
    assert {"dflash", "markov", "gated", "rnn", "dflash2", "peagle"} <= BLOCK_KINDS.keys()
