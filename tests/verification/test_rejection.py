"""
Recursive rejection sampling without replacement: what comes out is distributed as p, whatever p, q and the tree are.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.exact import SIGNIFICANCE, fit, fit_counts
from support.tables import (
    DRAFTS_OF_TABLES,
    TREES_OF_TABLES,
    TableModel,
    by_hand,
    by_rejection,
    call_rows,
    fan,
    ordered_draws,
    recursive_rejection,
    token_law,
    walk,
)

from hf_specdec.drafters.growth import draw_without_replacement
from hf_specdec.trees import DraftTree, TokenTree, Topology
from hf_specdec.verification import walk_by_rejection


VOCAB = 16
SAMPLES = 5_000
"""With 16 cells every bias with a total variation over 0.06 is found (`test_power`)."""

NEVER = -torch.inf


def _normal(sharpness: float, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return sharpness * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def _only(scores: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The scores with all other tokens impossible."""
    return torch.full_like(scores, NEVER).index_put((torch.tensor(tokens),), scores[tokens])


PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "close": (_normal(1.5, 0), _normal(1.5, 0) + _normal(0.5, 1)),
    "far": (_normal(1.5, 0), _normal(1.5, 2)),
    "identical": (_normal(1.5, 3), _normal(1.5, 3)),
    "disjoint": (_only(_normal(1.0, 4), [0, 1, 2, 3, 4, 5, 6]), _only(_normal(1.0, 5), [8, 9, 10, 11, 12])),
    "flat p, peaked q": (torch.zeros(VOCAB), _normal(1.0, 6).index_fill(0, torch.tensor([3]), 12.0)),
    "peaked p, flat q": (_normal(1.0, 7).index_fill(0, torch.tensor([3]), 12.0), torch.zeros(VOCAB)),
    "both peaked": (_normal(1.0, 8).index_fill(0, torch.tensor([3]), 9.0), _normal(1.0, 9) + _normal(8.0, 10)),
    "q of 2 tokens": (_normal(1.0, 11), _only(_normal(1.0, 12), [2, 9])),
    "q of 1 token": (_normal(1.0, 11), _only(_normal(1.0, 12), [9])),
    "p of 2 tokens": (_only(_normal(1.0, 13), [1, 14]), _normal(1.0, 14)),
    "p inside q": (_only(_normal(1.0, 15), [4, 5, 6]), _only(_normal(1.0, 16), [2, 3, 4, 5, 6, 7])),
    "p and q cut alike": (_only(_normal(1.0, 17), [0, 5, 6, 7]), _only(_normal(1.0, 18), [5, 6, 7, 9])),
}


def _probabilities(scores: torch.Tensor) -> np.ndarray:
    return scores.double().softmax(dim=-1).numpy()


def _walk_one_node(p: torch.Tensor, q: torch.Tensor, count: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that come out at a node with `count` drawn children, and which child was accepted (`count`: none)."""
    draft = TableModel(q.expand(1, VOCAB, VOCAB)).grow(fan(count), samples)
    walked = walk(draft, p.expand(samples, count + 1, -1), by_rejection)
    places = [path[0] - 1 if path else count for path in walked.paths]
    return torch.tensor([tokens[0] for tokens in walked.tokens]), torch.tensor(places)


# --------------------------------------------------------------------------------------------------------- enumeration


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_theory_is_exact(count: int, seed: int):
    p, q = _probabilities(_normal(2.0, seed, vocab=6)), _probabilities(_normal(2.0, 100 + seed, vocab=6))
    law, places = token_law(p, q, count)
    np.testing.assert_allclose(law, p, atol=1e-12)
    assert places.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["close", "far", "identical", "q of 3 tokens", "p of 2 tokens", "disjoint"])
def test_every_threshold_and_residual(kind: str, count: int, monkeypatch: pytest.MonkeyPatch):
    """
    The library's own law without sampling: for every ordered draw, each child is accepted just below the ratio that
    theory has and refused just above, and the token after all refusals is drawn from the theory's residual.
    """
    generator = torch.Generator().manual_seed(5)
    p_scores, q_scores = 1.5 * torch.randn(2, 5, generator=generator)
    if kind == "close":
        q_scores = p_scores + 0.2 * q_scores
    elif kind == "identical":
        q_scores = p_scores
    elif kind == "q of 3 tokens":
        q_scores = _only(q_scores, [0, 2, 4])
    elif kind == "p of 2 tokens":
        p_scores = _only(p_scores, [1, 4])
    elif kind == "disjoint":
        p_scores, q_scores = _only(p_scores, [1, 4]), _only(q_scores, [0, 2, 3])
    p, q = _probabilities(p_scores), _probabilities(q_scores)

    rows, uniform, expected = [], [], []
    drawn, _ = ordered_draws(q, count)
    for children, ratios, residual in zip(drawn.tolist(), *recursive_rejection(p, q, drawn), strict=True):
        refused = [min(ratio * (1 + 1e-7), 1 - 1e-12) for ratio in ratios]
        # A child whose ratio is 1 cannot be refused: the walk goes no further.
        certain = next((place for place, ratio in enumerate(ratios) if ratio > 1 - 1e-7), count)
        for place in range(count):
            if place <= certain and ratios[place] > 0:
                rows.append(children)
                uniform.append([*refused[:place], ratios[place] * (1 - 1e-7), *[0.0] * (count - place - 1)])
                expected.append((place, None))
        rows.append(children)
        uniform.append(refused)
        expected.append((certain, residual) if certain == count else (certain, None))
    tokens = torch.tensor(rows)
    draft = by_hand(fan(count), tokens.clamp(min=0).tolist(), [q_scores])
    draft.valid = tokens >= 0
    columns = iter(torch.tensor(uniform, dtype=torch.float64).unbind(1))
    drawn_from: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "rand_like", lambda like: next(columns)[:, None])
    monkeypatch.setattr(
        torch, "multinomial", lambda weights, num_samples: drawn_from.append(weights) or weights.argmax(1, True)
    )
    walked = walk(draft, p_scores.expand(len(rows), count + 1, -1), by_rejection)
    for row, (place, residual) in enumerate(expected):
        accepted = walked.paths[row][0] - 1 if walked.paths[row] else count
        assert accepted == place, (rows[row], uniform[row])
        if residual is not None:
            np.testing.assert_allclose(drawn_from[0][row].numpy(), residual, atol=1e-9)
    assert any(residual is not None for _, residual in expected) == (kind != "identical")


# ------------------------------------------------------------------------------------------------------------ one node


def test_power():
    tokens = torch.multinomial(torch.ones(VOCAB), SAMPLES, replacement=True)
    assert fit(tokens, torch.full((VOCAB,), 1 / VOCAB)).detectable < 0.06


@pytest.mark.smoke
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS)
def test_output_is_distributed_as_p(pair: str, count: int):
    p, q = PAIRS[pair]
    tokens, places = _walk_one_node(p, q, count, SAMPLES)
    assert fit(tokens, p.softmax(dim=-1)).p_value > SIGNIFICANCE
    # Which child is accepted, or none, comes as often as theory says.
    _, law = token_law(_probabilities(p), _probabilities(q), count)
    assert fit(places, torch.from_numpy(law)).p_value > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_output_is_distributed_as_p_in_many_samples(seed: int, count: int):
    p, q = _normal(0.5 + 0.5 * seed, seed), _normal(3.0 - 0.3 * seed, 100 + seed)
    counts = np.zeros(VOCAB, dtype=np.int64)
    for _ in range(10):
        tokens, _ = _walk_one_node(p, q, count, 40_000)
        counts += torch.bincount(tokens, minlength=VOCAB).numpy()
    found = fit_counts(counts, _probabilities(p))
    assert found.p_value > SIGNIFICANCE
    assert found.detectable < 0.008


def test_identical_p_and_q_always_accept():
    p, q = PAIRS["identical"]
    for count in (1, 3):
        _, places = _walk_one_node(p, q, count, 5_000)
        assert (places == 0).all()


def test_disjoint_p_and_q_never_accept():
    p, q = PAIRS["disjoint"]
    _, places = _walk_one_node(p, q, 3, 5_000)
    assert (places == 3).all()


def test_children_beyond_the_support_are_void():
    p, q = PAIRS["q of 2 tokens"]
    draft = TableModel(q.expand(1, VOCAB, VOCAB)).grow(fan(4), rows=500)
    assert draft.valid[:, :2].all() and not draft.valid[:, 2:].any()
    _, places = _walk_one_node(p, q, 4, 5_000)
    assert set(places.tolist()) <= {0, 1, 4}


def test_more_children_are_accepted_more_often():
    p, q = map(_probabilities, PAIRS["far"])
    rates = [1 - token_law(p, q, count)[1][-1] for count in (1, 2, 3)]
    assert rates[0] == pytest.approx(np.minimum(p, q).sum())
    assert rates == sorted(rates) and rates[2] > rates[0] + 0.05


# ------------------------------------------------------------------------------------------------------------ numerics


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.02, 0.01, 0.001])
def test_low_temperatures(temperature: float):
    """
    What is left of q after its best token may be smaller than any float64 (here e^-800 at 0.01), yet it is a
    distribution: its second token must not be taken for one that q says nothing about.
    """
    p = torch.tensor([-1.0, 0.0, -2.0, -3.0]) / temperature
    q = torch.tensor([-8.0, -8.2, 0.0, -9.0]) / temperature
    drafts = TableModel(q.expand(1, 4, 4)).grow(fan(3), SAMPLES)
    walked = walk(drafts, p.expand(SAMPLES, 4, -1), by_rejection)
    assert fit(torch.tensor([tokens[0] for tokens in walked.tokens]), p.double().softmax(-1)).p_value > SIGNIFICANCE


def test_second_child_that_float64_cannot_hold():
    """q is 1, e^-800, e^-801: once the first is refused, the second child has to pass with 0.5 / 0.73, not always."""
    p, q = torch.tensor([NEVER, 0.0, 0.0]), torch.tensor([0.0, -800.0, -801.0])
    draft = by_hand(fan(2), [[0, 1]] * SAMPLES, [q])
    walked = walk(draft, p.expand(SAMPLES, 3, -1), by_rejection)
    accepted = torch.tensor([len(path) for path in walked.paths])
    ratio = 0.5 * (1 + float(np.exp(-1.0)))
    assert fit(accepted, torch.tensor([1 - ratio, ratio])).p_value > SIGNIFICANCE


@pytest.mark.parametrize("offset", [1e4, -1e4, 0.0])
def test_scores_need_no_normalisation(offset: float):
    p, q = PAIRS["far"]
    # float32 keeps three digits behind the point here: compare with what it keeps.
    p, q = p + offset, q + offset
    tokens, _ = _walk_one_node(p, q, 3, SAMPLES)
    assert fit(tokens, p.double().softmax(-1)).p_value > SIGNIFICANCE


def test_an_empty_residual_falls_back_to_p(monkeypatch: pytest.MonkeyPatch):
    """
    Where p and q agree to the last bit a refusal is impossible; where rounding brings one about, p itself is drawn
    from.
    """
    p = _normal(1.0, 3)
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)
    draft = by_hand(fan(1), [[5]] * SAMPLES, [p])
    walked = walk(draft, p.expand(SAMPLES, 2, -1), by_rejection)
    assert all(path == [] for path in walked.paths)
    assert fit(torch.tensor([tokens[0] for tokens in walked.tokens]), p.softmax(-1)).p_value > SIGNIFICANCE


def test_p_and_q_that_differ_in_the_last_bits():
    p = _normal(1.0, 3)
    q = torch.nextafter(p, torch.full_like(p, torch.inf))
    tokens, places = _walk_one_node(p, q, 3, SAMPLES)
    assert fit(tokens, p.softmax(-1)).p_value > SIGNIFICANCE
    assert (places == 0).float().mean() > 0.999


# --------------------------------------------------------------------------------------------------------------- trees


@pytest.mark.parametrize("cut", [False, True], ids=["p with all tokens", "p of 3 tokens"])
@pytest.mark.parametrize("draft", DRAFTS_OF_TABLES)
@pytest.mark.parametrize("tree", TREES_OF_TABLES)
def test_joint_distribution_of_trees(tree: str, draft: str, cut: bool):
    """Two tokens behind the root, and the bonus token or what is drawn after it, at trees of up to three levels."""
    target = TableModel.random(4, 8, 1.5, seed=20, support=3 if cut else None)
    drafts = DRAFTS_OF_TABLES[draft](target, 24).grow(TREES_OF_TABLES[tree], 4_000)
    walked = walk(drafts, target.score(drafts), by_rejection)
    texts = target.finish(walked.tokens, 3)
    found = fit(texts, target.joint(3))
    assert found.p_value > SIGNIFICANCE
    assert found.detectable < 0.12
    assert fit(texts[:, 0], target.joint(1)).p_value > SIGNIFICANCE
    assert sum(map(len, walked.paths)) > 0


def test_bonus_token_after_a_full_path():
    target = TableModel.random(4, 8, 1.5, seed=20)
    drafts = DRAFTS_OF_TABLES["close"](target, 24).grow(TokenTree.chain(1), SAMPLES)
    walked = walk(drafts, target.score(drafts), by_rejection)
    full = torch.tensor([tokens for tokens in walked.tokens if len(tokens) == 2])
    assert len(full) > SAMPLES / 2
    for token in range(8):
        bonus = full[full[:, 0] == token, 1]
        if len(bonus) > 500:
            assert fit(bonus, target.scores[1, token].softmax(-1)).p_value > SIGNIFICANCE


def test_children_drawn_by_another_routine():
    """A tree written by hand, its children drawn one after the other by `torch.multinomial`."""
    target, draft = TableModel.random(3, 6, 1.5, seed=30), TableModel.random(3, 6, 1.5, seed=31)
    generator = torch.Generator().manual_seed(1)

    def draw(weights: torch.Tensor, count: int) -> list[torch.Tensor]:
        drawn = []
        for _ in range(count):
            drawn.append(torch.multinomial(weights, 1, generator=generator))
            weights = weights.scatter(1, drawn[-1], 0.0)
        return [tokens[:, 0] for tokens in drawn]

    root = draft.root.softmax(-1).expand(SAMPLES, -1)
    first, second = draw(root, 2)
    of_first = draw(draft.scores[1, first].softmax(-1), 3)
    tree = TokenTree.parse("[(0,), (1,), (0,0), (0,1), (0,2)]")
    tokens = torch.stack([first, second, *of_first], dim=1)
    hand = by_hand(tree, tokens.tolist(), [draft.root, draft.scores[1, first]])
    texts = target.finish(walk(hand, target.score(hand), by_rejection).tokens, 3)
    assert fit(texts, target.joint(3)).p_value > SIGNIFICANCE


def test_rows_of_one_batch_do_not_mix():
    """Rows with other p, q and numbers of children side by side: each kind by itself is exact."""
    kinds = [("far", 1), ("flat p, peaked q", 4), ("q of 2 tokens", 3), ("disjoint", 2)]
    rows = torch.arange(SAMPLES) % len(kinds)
    p = torch.stack([PAIRS[pair][0] for pair, _ in kinds])[rows]
    q = torch.stack([PAIRS[pair][1] for pair, _ in kinds])[rows]
    tokens, drawable = draw_without_replacement(q, 4)
    draft = by_hand(fan(4), tokens.tolist(), [q])
    draft.valid = drawable & (torch.arange(4) < torch.tensor([count for _, count in kinds])[rows][:, None])
    walked = walk(draft, p[:, None].expand(-1, 5, -1), by_rejection)
    out = torch.tensor([tokens[0] for tokens in walked.tokens])
    for kind, (pair, count) in enumerate(kinds):
        scores = PAIRS[pair][0]
        assert fit(out[rows == kind], scores.softmax(-1)).p_value > SIGNIFICANCE
        places = torch.tensor([path[0] - 1 if path else count for path in walked.paths])[rows == kind]
        _, law = token_law(*map(_probabilities, PAIRS[pair]), count)
        assert fit(places, torch.from_numpy(law)).p_value > SIGNIFICANCE


def test_resting_rows_and_trees_without_nodes():
    target = TableModel.random(3, 8, 1.5, seed=20)
    draft = target.grow(TokenTree.parse("[(0,), (1,), (0,0)]"), rows=4)
    distribution = call_rows([], torch.zeros(4, 1, dtype=torch.long)).distribution(target.score(draft))
    walked = walk_by_rejection(draft, distribution, [1, 3])
    assert walked.paths[0] is None and walked.paths[2] is None
    assert walked.tokens[0] == [] and walked.tokens[2] == []
    assert all(len(walked.tokens[row]) == len(walked.paths[row]) + 1 for row in (1, 3))

    empty = DraftTree.empty(SAMPLES, torch.device("cpu"))
    texts = walk(empty, target.root.expand(SAMPLES, 1, -1), by_rejection).tokens
    assert fit(torch.tensor([tokens[0] for tokens in texts]), target.joint(1)).p_value > SIGNIFICANCE


def test_a_whole_vocabulary_of_children_accepts_always():
    p, q = _normal(1.5, 40, vocab=4), _normal(1.5, 41, vocab=4)
    drawn, _ = ordered_draws(_probabilities(q), 4)
    acceptance, _ = recursive_rejection(_probabilities(p), _probabilities(q), drawn)
    np.testing.assert_allclose(acceptance.max(axis=1), 1.0)
    draft = TableModel(q.expand(1, 4, 4)).grow(fan(4), SAMPLES)
    walked = walk(draft, p.expand(SAMPLES, 5, -1), by_rejection)
    assert all(len(path) == 1 for path in walked.paths)
    assert fit(torch.tensor([tokens[0] for tokens in walked.tokens]), p.softmax(-1)).p_value > SIGNIFICANCE


def test_children_without_the_scores_that_they_were_drawn_from() -> None:
    """Taken for the last of the scores, -1 would bias the text."""
    tree = TokenTree.chain(2)
    drawn = DraftTree(
        torch.tensor([[1, 2]]),
        Topology.of_tree(tree, torch.device("cpu")),
        scores=torch.zeros(1, 2, 8),
        score_index=[[0, -1, -1]],
    )
    assert torch.equal(drawn.scores_of(0, 0), torch.zeros(8))
    with pytest.raises(ValueError, match="`score_index`: node 1 has children, but no scores"):
        drawn.scores_of(0, 1)
