"""Growing trees: children are drawn by the law that verification assumes, and nothing that was drawn is dropped."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from support.exact import SIGNIFICANCE, combine, fit, fit_counts
from support.tables import TableModel, ordered_draws

from hf_specdec.drafters.growth import draw_without_replacement
from hf_specdec.trees import DraftTree, DynamicTree, TokenTree
from hf_specdec_kernels.budgets import share_out_naive


VOCAB = 6
MODEL = TableModel.random(4, VOCAB, 1.5, seed=1)
IRREGULAR = TokenTree.parse("[(0,), (1,), (2,), (0,0), (0,1), (1,0), (2,0), (2,1), (2,2), (0,1,0), (0,1,1)]")
BUDGETS = DynamicTree(depth=3, top_k=3, num_nodes=10)


def _order_law(scores: torch.Tensor, count: int) -> np.ndarray:
    """The probability of every ordered draw of `count` tokens, `[vocab] * count`."""
    law = np.zeros([len(scores)] * count)
    drawn, probability = ordered_draws(scores.double().softmax(-1).numpy(), count)
    np.add.at(law, tuple(drawn.T), probability)
    return law


# --------------------------------------------------------------------------------------------------- draws at one node


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0])
def test_draws_are_successive(sharpness: float, count: int):
    """Gumbel-top-k gives, in its order, exactly what drawing one after the other gives."""
    scores = sharpness * torch.randn(5, generator=torch.Generator().manual_seed(3))
    tokens, drawable = draw_without_replacement(scores.expand(100_000, -1), count)
    assert drawable.all()
    found = fit(tokens, torch.from_numpy(_order_law(scores, count)))
    assert found.p_value > SIGNIFICANCE
    assert found.detectable < 0.02


def test_first_draw_of_a_large_vocabulary():
    scores = 2 * torch.randn(1000, generator=torch.Generator().manual_seed(4))
    tokens, _ = draw_without_replacement(scores.expand(20_000, -1), 1)
    assert fit(tokens, scores.softmax(-1)).p_value > SIGNIFICANCE


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e3])
def test_draws_from_scores_that_are_not_normalised(offset: float):
    scores = torch.randn(5, generator=torch.Generator().manual_seed(3)) + offset
    tokens, _ = draw_without_replacement(scores.expand(100_000, -1), 3)
    assert fit(tokens, torch.from_numpy(_order_law(scores, 3))).p_value > SIGNIFICANCE


@pytest.mark.parametrize("temperature", [1e-4, 1e-6])
def test_draws_at_temperatures_near_zero(temperature: float):
    """Scores so large that float32 would round the noise away beside them: the tied best tokens come equally often."""
    scores = torch.tensor([78.7378, 13.0, 78.7378, 78.7378]) / temperature
    torch.manual_seed(0)
    tokens, drawable = draw_without_replacement(scores.expand(60_000, -1), 1)
    assert drawable.all()
    assert fit(tokens, torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3])).p_value > SIGNIFICANCE


def test_draws_beyond_the_support():
    scores = torch.tensor([0.3, -torch.inf, -1.0, -torch.inf, 0.0])
    tokens, drawable = draw_without_replacement(scores.expand(50_000, -1), 5)
    assert (drawable == torch.tensor([True, True, True, False, False])).all()
    assert (tokens.sort(dim=1).values == torch.arange(5)).all()
    assert fit(tokens[:, :3], torch.from_numpy(_order_law(scores, 3))).p_value > SIGNIFICANCE


def test_draws_of_several_nodes_are_independent():
    """Nodes that hold the same token have the same q; their children are drawn anew all the same."""
    scores = torch.randn(4, generator=torch.Generator().manual_seed(3))
    tokens, _ = draw_without_replacement(scores.expand(50_000, 2, -1), 2)
    law = torch.from_numpy(_order_law(scores, 2))
    assert fit(tokens.flatten(1), law[:, :, None, None] * law).p_value > SIGNIFICANCE


# -------------------------------------------------------------------------------------------------------- static trees


@pytest.mark.parametrize(
    "model", [MODEL, TableModel.random(4, VOCAB, 1.5, seed=1, support=4)], ids=["all", "4 tokens"]
)
def test_every_node_of_a_static_tree_draws_from_its_own_q(model: TableModel):
    drafts = model.grow(IRREGULAR, rows=20_000)
    tokens = torch.nn.functional.pad(drafts.tokens, (1, 0))
    assert drafts.valid.all()
    for node, children in enumerate(IRREGULAR.children):
        if not children:
            continue
        fits = []
        for token in tokens[:, node].unique().tolist():
            rows = tokens[:, node] == token
            scores = model.scores[IRREGULAR.depths[node], token]
            if rows.sum() >= 200:
                law = torch.from_numpy(_order_law(scores, len(children)))
                fits.append(fit(tokens[rows][:, list(children)], law))
            assert torch.equal(drafts.scores_of(int(rows.nonzero()[0]), node), scores)
        assert combine(fits).p_value > SIGNIFICANCE


def test_nothing_below_a_void_node_counts():
    model = TableModel.random(4, VOCAB, 1.5, seed=1, support=2)
    drafts = model.grow(IRREGULAR, rows=500)
    void = {node for node, path in enumerate(IRREGULAR.paths, start=1) if max(path) >= 2}
    for node in range(1, IRREGULAR.num_nodes + 1):
        assert (drafts.valid[:, node - 1] == (node not in void)).all()


def test_a_static_tree_of_best_tokens():
    drafts = MODEL.grow_best(IRREGULAR, rows=2)
    tokens = [0, *drafts.tokens[0].tolist()]
    for node in range(1, IRREGULAR.num_nodes + 1):
        parent = IRREGULAR.parents[node]
        ranked = MODEL.scores[IRREGULAR.depths[parent], tokens[parent]].argsort(descending=True)
        assert tokens[node] == int(ranked[IRREGULAR.ranks[node]])
    assert drafts.scores is None and torch.equal(drafts.tokens[0], drafts.tokens[1])


# ------------------------------------------------------------------------------------------------------- dynamic trees


def _children(drafts: DraftTree, row: int, node: int) -> tuple[int, ...]:
    """Tokens of the children that count, in order."""
    tokens = drafts.tokens_list[row]
    children = drafts.topology.children_of(row, node)
    return tuple(tokens[child - 1] for child in children if tokens[child - 1] >= 0)


@pytest.mark.parametrize("seed", range(5))
def test_budgets_go_to_the_largest_gains(seed: int):
    generator = torch.Generator().manual_seed(seed)
    gains = torch.randn(3, 4, 5, generator=generator).sort(dim=-1, descending=True).values
    nodes, valid = torch.arange(4).expand(3, -1), torch.ones(3, 4, dtype=torch.bool)
    for budget in (1, 7, 20):
        drawn = torch.zeros_like(gains).long()
        parents = share_out_naive(nodes, torch.zeros(3, 4), valid, gains, drawn, gains, budget, 1, 1)[2]
        counts = (parents[:, None] == torch.arange(4)[:, None]).sum(dim=2)
        assert (counts.sum(dim=1) == budget).all()
        for row in range(3):
            taken = [gains[row, node, rank] for node in range(4) for rank in range(counts[row, node])]
            left = [gains[row, node, rank] for node in range(4) for rank in range(counts[row, node], 5)]
            assert not left or min(taken) >= max(left)


def test_a_budgeted_tree_keeps_everything_it_draws():
    drafts = MODEL.grow(BUDGETS, rows=300)
    assert drafts.num_nodes == BUDGETS.num_nodes
    assert drafts.valid.all()
    for row in range(300):
        for node in range(BUDGETS.num_nodes + 1):
            children = _children(drafts, row, node)
            assert len(set(children)) == len(children) <= BUDGETS.top_k


def test_budgets_depend_only_on_what_was_drawn_above():
    """
    Rows share q and differ in their draws. The shape of each level is a function of the tokens of the levels above.
    """
    drafts = MODEL.grow(BUDGETS, rows=5_000)
    depths, parents = drafts.topology.depths[:, 1:], drafts.topology.parents[:, 1:]
    assert (depths == depths[0]).all(), "how many nodes a level has is fixed from the start"
    for level in (1, 2, 3):
        above = drafts.tokens[:, depths[0] < level]
        shapes = defaultdict(set)
        for tokens, shape in zip(above.tolist(), parents[:, depths[0] == level].tolist(), strict=True):
            shapes[tuple(tokens)].add(tuple(shape))
        assert all(len(shape) == 1 for shape in shapes.values())
    assert len({tuple(row) for row in parents.tolist()}) > 1, "trees of these rows should differ in shape"


def test_every_node_of_a_budgeted_tree_draws_from_its_own_q():
    drafts = MODEL.grow(BUDGETS, rows=20_000)
    drawn: dict[tuple[int, int, int], dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
    depths = drafts.topology.depths[0].tolist()
    for row, tokens in enumerate(drafts.tokens_list):
        for node in range(BUDGETS.num_nodes + 1):
            if children := _children(drafts, row, node):
                token = tokens[node - 1] if node else 0
                drawn[depths[node], token, len(children)][children] += 1
                if row < 20:
                    assert torch.equal(drafts.scores_of(row, node), MODEL.scores[depths[node], token])
    fits = []
    for (depth, token, count), orders in drawn.items():
        counts = np.zeros([VOCAB] * count, dtype=np.int64)
        for order, times in orders.items():
            counts[order] = times
        if counts.sum() >= 200:
            fits.append(fit_counts(counts, _order_law(MODEL.scores[depth, token], count)))
    assert len(fits) > 5
    assert combine(fits).p_value > SIGNIFICANCE


@pytest.mark.parametrize("support", [1, 2])
def test_a_budgeted_tree_with_little_support(support: int):
    model = TableModel.random(4, VOCAB, 1.5, seed=1, support=support)
    drafts = model.grow(BUDGETS, rows=200)
    for row in range(200):
        for node in range(1, drafts.num_nodes + 1):
            if drafts.valid[row, node - 1]:
                parent = int(drafts.topology.parents[row, node])
                assert parent == 0 or drafts.valid[row, parent - 1]
        assert 1 <= len(_children(drafts, row, 0)) <= support


@pytest.mark.parametrize("depth", [1, 2])
def test_a_budgeted_tree_that_is_cut_short(depth: int):
    drafts = MODEL.grow(BUDGETS, rows=10, depth=depth)
    assert drafts.topology.depth == int(drafts.topology.depths.max()) == depth
    assert drafts.num_nodes == (3 if depth == 1 else 10)


def test_dynamic_trees_of_best_tokens_are_those_of_eagle_2():
    """Against a plain re-telling: expand the best `top_k` of each level, keep the best `num_nodes` of all."""
    limits = DynamicTree(depth=3, top_k=3, num_nodes=8)
    log_q = MODEL.scores.double().log_softmax(-1)
    best = log_q.topk(3, dim=-1)
    frontier, candidates = [((), 0.0)], []
    for level in range(3):
        below = []
        for path, total in frontier:
            last = path[-1] if path else 0
            for value, token in zip(best.values[level, last], best.indices[level, last], strict=True):
                below.append(((*path, int(token)), total + float(value)))
        candidates += below
        frontier = sorted(below, key=lambda item: -item[1])[:3]
    kept = {path for path, _ in sorted(candidates, key=lambda item: -item[1])[:8]}

    drafts = MODEL.grow_best(limits, rows=1)
    paths = {0: ()}
    for node in range(1, 9):
        paths[node] = (*paths[int(drafts.topology.parents[0, node])], int(drafts.tokens[0, node - 1]))
    assert {path for node, path in paths.items() if node} == kept
