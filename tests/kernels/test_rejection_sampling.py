"""
The kernels' walks against enumerated distributions, and against the library's own verifiers. (That the Triton versions
decide as the plain ones do, random number by random number, is tested in the kernels' folder.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.exact import SIGNIFICANCE, fit
from support.tables import DRAFTS_OF_TABLES, TREES_OF_TABLES, TableModel, fan, token_law
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import hf_specdec_kernels
from hf_specdec.trees import DraftTree
from hf_specdec_kernels import Walks
from hf_specdec_kernels.rejection_sampling import naive
from hf_specdec_kernels.rejection_sampling.filters import target_probabilities


SAMPLES = 12_000


def tree_arguments(draft: DraftTree, logits: torch.Tensor) -> dict:
    """A draft tree as the walks take it."""
    tokens = draft.tokens if draft.valid is None else draft.tokens.masked_fill(~draft.valid, -1)
    return {
        "logits": logits,
        "tokens": torch.nn.functional.pad(tokens, (1, 0), value=-1),
        "parents": draft.topology.parents,
        "max_depth": draft.topology.depth,
    }


def by_rejection(draft: DraftTree, logits: torch.Tensor) -> Walks:
    arguments = tree_arguments(draft, logits)
    uniforms = torch.rand(arguments["tokens"].shape, dtype=torch.float64)
    index = torch.tensor(draft.score_index)
    return hf_specdec_kernels.rejection_walk(
        draft_logits=draft.scores, uniforms=uniforms, draft_index=index, **arguments
    )


def by_target(draft: DraftTree, logits: torch.Tensor) -> Walks:
    arguments = tree_arguments(draft, logits)
    return hf_specdec_kernels.target_walk(uniforms=torch.rand(arguments["tokens"].shape), **arguments)


def texts(draft: DraftTree, walks: Walks) -> list[list[int]]:
    """The tokens that come out of every row."""
    tokens = torch.nn.functional.pad(draft.tokens, (1, 0))
    along = tokens.gather(1, walks.path).tolist()
    rows = zip(along, walks.accepted.tolist(), walks.next_tokens.tolist(), strict=True)
    return [[*row[1 : accepted + 1], last] for row, accepted, last in rows]


@pytest.mark.parametrize("draft", DRAFTS_OF_TABLES)
@pytest.mark.parametrize("tree", TREES_OF_TABLES)
def test_rejection_has_the_joint_distribution(tree: str, draft: str) -> None:
    """Two tokens behind the root and the one after them, at trees of up to three levels."""
    target = TableModel.random(4, 8, 1.5, seed=20, support=3 if draft == "far" else None)
    drafts = DRAFTS_OF_TABLES[draft](target, 24).grow(TREES_OF_TABLES[tree], 8_000)
    walks = by_rejection(drafts, target.score(drafts))
    found = fit(target.finish(texts(drafts, walks), 3), target.joint(3))
    assert found.p_value > SIGNIFICANCE
    assert found.detectable < 0.08
    assert walks.accepted.sum() > 0


@pytest.mark.parametrize("tree", TREES_OF_TABLES)
def test_target_has_the_joint_distribution(tree: str) -> None:
    target = TableModel.random(4, 8, 1.5, seed=20)
    drafts = DRAFTS_OF_TABLES["close"](target, 24).grow_best(TREES_OF_TABLES[tree], 8_000)
    walks = by_target(drafts, target.score(drafts))
    found = fit(target.finish(texts(drafts, walks), 3), target.joint(3))
    assert found.p_value > SIGNIFICANCE
    assert walks.accepted.sum() > 0


def one_node(count: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray, torch.Tensor]:
    """Tokens and places that come out at one node with `count` children, and what they are to be."""
    generator = torch.Generator().manual_seed(3)
    p, q = torch.tensor([[1.5], [2.5]]) * torch.randn(2, 16, generator=generator)
    drafts = TableModel(q.expand(1, 16, 16)).grow(fan(count), SAMPLES)
    walks = by_rejection(drafts, p.expand(SAMPLES, count + 1, -1).contiguous())
    tokens = torch.tensor([text[0] for text in texts(drafts, walks)])
    places = torch.where(walks.accepted > 0, walks.path[:, 1] - 1, count)
    probabilities = [scores.double().softmax(-1).numpy() for scores in (p, q)]
    return tokens, places, *token_law(*probabilities, count), p.softmax(-1)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_children_are_accepted_as_often_as_theory_says(count: int) -> None:
    tokens, places, _, law, p = one_node(count)
    assert fit(tokens, p).p_value > SIGNIFICANCE
    assert fit(places, torch.from_numpy(law)).p_value > SIGNIFICANCE


def _without_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty residual leaves p as it is."""
    clamp = torch.Tensor.clamp

    def clamp_probabilities_to_zero(tensor: torch.Tensor, *args: int, **limits: int) -> torch.Tensor:
        return clamp(tensor, *args, **limits) * (tensor.dtype != torch.float64)

    monkeypatch.setattr(torch.Tensor, "clamp", clamp_probabilities_to_zero)


def _with_refused_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """q stays what it was."""
    scatter = torch.Tensor.scatter
    monkeypatch.setattr(
        torch.Tensor,
        "scatter",
        lambda tensor, dim, at, value: tensor if isinstance(value, float) else scatter(tensor, dim, at, value),
    )


def _with_draws_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recovered token comes from p, not from what is left of it."""
    draw, p = naive.draw, one_node(1)[-1].double()
    monkeypatch.setattr(naive, "draw", lambda residual, uniforms: draw(p.expand_as(residual), uniforms))


def _with_one_number_for_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """All children of a node are tested with the same random number."""
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda shape, dtype: rand(shape[0], 1, dtype=dtype).repeat(1, shape[1]))


@pytest.mark.parametrize(
    "mistake", [_without_residuals, _with_refused_tokens, _with_draws_from_p, _with_one_number_for_all_tests]
)
def test_wrong_samplers_are_found(mistake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails with each of these mistakes."""
    mistake(monkeypatch)
    tokens, places, _, law, p = one_node(3)
    assert fit(tokens, p).p_value < SIGNIFICANCE or fit(places, torch.from_numpy(law)).p_value < SIGNIFICANCE


@pytest.mark.parametrize("tree", TREES_OF_TABLES)
def test_greedy_goes_along_the_argmax(tree: str) -> None:
    target = TableModel.random(4, 8, 1.5, seed=20)
    drafts = DRAFTS_OF_TABLES["close"](target, 24).grow(TREES_OF_TABLES[tree], 300)
    logits = (4 * target.score(drafts)).round()  # with ties
    walks = hf_specdec_kernels.greedy_walk(**tree_arguments(drafts, logits))
    assert walks.accepted.sum() > 0
    valid = torch.nn.functional.pad(drafts.valid, (1, 0), value=True)
    tokens = torch.nn.functional.pad(drafts.tokens, (1, 0))
    children = drafts.topology.children
    for row in range(len(tokens)):
        node, path = 0, [0]
        while True:
            best = int(logits[row, node].argmax())
            of_row = children[row if len(children) > 1 else 0][node]
            held = [child for child in of_row if tokens[row, child] == best and valid[row, child]]
            if not held:
                break
            node = held[0]
            path.append(node)
        assert walks.path[row, : len(path)].tolist() == path
        assert walks.accepted[row] == len(path) - 1
        assert walks.next_tokens[row] == best


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_filters_are_those_of_transformers(temperature: float, top_p: float, top_k: int, ties: bool) -> None:
    logits = 2 * torch.randn(40, 30)
    if ties:
        logits = logits.round()
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    rows = torch.ones(40)
    found = target_probabilities(logits, rows * temperature, (rows * top_k).int(), rows * top_p)
    expected = scores.double().softmax(-1)
    if ties:  # which of equally good tokens top-p keeps depends on how transformers' sort leaves them
        found, expected = found.sort(dim=-1).values, expected.sort(dim=-1).values
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
