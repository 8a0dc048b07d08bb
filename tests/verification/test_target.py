"""Verification by the target alone: exact whatever the children are."""

from __future__ import annotations

import pytest
import torch
from support.exact import SIGNIFICANCE, FrequencyPenalty, fit
from support.tables import TableModel, by_hand, by_target, call_rows, fan, walk
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specdec.trees import DraftTree, DynamicTree, TokenTree
from hf_specdec.verification import TargetDistribution, Walk, choose, walk_by_rejection, walk_target


SAMPLES = 5_000
TARGET = TableModel.random(4, 8, 1.5, seed=20)
IRREGULAR = TokenTree.parse("[(0,), (1,), (2,), (0,0), (0,1), (1,0), (0,0,0), (0,0,1), (1,0,0)]")


def _drafts(kind: str) -> DraftTree:
    close = TableModel(TARGET.scores + 0.5 * TableModel.random(4, 8, 1.0, seed=21).scores)
    if kind == "best":
        return close.grow_best(IRREGULAR, SAMPLES)
    if kind == "best with rank gaps":
        return close.grow_best(TokenTree.parse("[(1,), (3,), (1,2)]"), SAMPLES)
    if kind == "dynamic":
        return close.grow_best(DynamicTree(depth=3, top_k=3, num_nodes=8), SAMPLES)
    if kind == "drawn":
        return close.grow(IRREGULAR, SAMPLES)
    if kind == "drawn, then only the likely ones kept":
        # Ruinous for p/q tests (see test_wrong_samplers), harmless here.
        drafts = close.grow(fan(4), SAMPLES)
        likely = close.root.softmax(-1)[drafts.tokens].topk(2, dim=1).indices
        drafts.valid = torch.zeros_like(drafts.valid).scatter(1, likely, True)
        return drafts
    generator = torch.Generator().manual_seed(3)
    tokens = torch.stack([torch.randperm(8, generator=generator)[:5] for _ in range(SAMPLES)])
    drafts = by_hand(TokenTree.parse("[(0,), (1,), (2,), (0,0), (1,0)]"), tokens.tolist(), [TARGET.root] * 3)
    drafts.valid = torch.rand(SAMPLES, 5, generator=generator) < 0.7
    drafts.valid[:, 3] &= drafts.valid[:, 0]
    drafts.valid[:, 4] &= drafts.valid[:, 1]
    return drafts


KINDS = (
    "best",
    "best with rank gaps",
    "dynamic",
    "drawn",
    "drawn, then only the likely ones kept",
    "random tokens, some void",
)


@pytest.mark.parametrize("ahead", [False, True], ids=["node by node", "all nodes ahead"])
@pytest.mark.parametrize("kind", KINDS)
def test_joint_distribution(kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch):
    """`ahead` is the way of accelerators: one draw for every node before the walk."""
    monkeypatch.setattr(TargetDistribution, "reads_ahead", ahead)
    drafts = _drafts(kind)
    walked = walk(drafts, TARGET.score(drafts), by_target)
    texts = TARGET.finish(walked.tokens, 3)
    found = fit(texts, TARGET.joint(3))
    assert found.p_value > SIGNIFICANCE
    assert found.detectable < 0.11
    accepted = torch.tensor([len(path) for path in walked.paths])
    assert accepted.sum() > 0
    # The walk ends where the target's token is no child: the first level is passed as often as p says.
    mass = torch.zeros(SAMPLES, dtype=torch.float64)
    p = TARGET.root.double().softmax(-1)
    for row in range(SAMPLES):
        tokens = drafts.tokens_list[row]
        children = drafts.topology.children_of(row, 0)
        mass[row] = sum(p[tokens[child - 1]] for child in children if tokens[child - 1] >= 0)
    spread = (mass * (1 - mass)).sum().sqrt()
    assert abs((accepted > 0).sum() - mass.sum()) < 4 * spread


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_walks_along_the_argmax(ahead: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TargetDistribution, "reads_ahead", ahead)

    def greedy(draft: DraftTree, distribution: TargetDistribution, rows: list[int]) -> Walk:
        return walk_target(draft, distribution, rows, do_sample=False)

    best = [int(TARGET.root.argmax())]
    for level in range(1, 4):
        best.append(int(TARGET.scores[level, best[-1]].argmax()))
    other = (best[0] + 1) % 8
    tree = TokenTree.parse("[(0,), (1,), (0,0), (1,0), (1,0,0)]")
    rows = [
        [other, best[0], best[1], best[1], best[2]],
        [best[0], other, best[1], 0, 0],
        [best[0], other, (best[1] + 1) % 8, 0, 0],
        [other, (other + 1) % 8 if (other + 1) % 8 != best[0] else (other + 2) % 8, 0, 0, 0],
    ]
    draft = by_hand(tree, rows, [TARGET.root] * 4)
    walked = walk(draft, TARGET.score(draft), greedy)
    assert walked.paths == [[2, 4, 5], [1, 3], [1], []]
    assert walked.tokens == [best[:4], best[:3], best[:2], best[:1]]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", ["visited", "not visited"])
def test_nothing_to_draw_matters_only_where_the_walk_stands(
    place: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in plain `generate`, which never computes the scores of tokens that are not in the text."""
    monkeypatch.setattr(TargetDistribution, "reads_ahead", ahead)
    draft = by_hand(TokenTree.parse("[(0,), (1,)]"), [[3, 4]], [TARGET.root])
    logits = torch.full((1, 3, 8), -torch.inf)
    logits[0, 0, 3] = logits[0, 1, 5] = 0.0  # 3, then 5
    logits[0, 1 if place == "visited" else 2, 6] = torch.inf
    if place == "visited":
        with pytest.raises(RuntimeError, match="probability tensor"):
            walk(draft, logits, by_target)
    else:
        assert walk(draft, logits, by_target).tokens == [[3, 5]]


def test_choose_draws_from_the_softmax():
    scores = TARGET.scores[0, 0]
    drawn = choose(scores.expand(SAMPLES // 2, 2, -1), do_sample=True)
    assert drawn.shape == (SAMPLES // 2, 2)
    pairs = TARGET.root.softmax(-1)
    assert fit(drawn, pairs[:, None] * pairs).p_value > SIGNIFICANCE


# ----------------------------------------------------------------------------------- processors see the path's history


class _Notes:
    """A processor that writes down with which histories it is called, and makes the next token depend on them."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.seen += input_ids.tolist()
        return scores


@pytest.mark.parametrize("verify", [walk_by_rejection, lambda *arguments: walk_target(*arguments, do_sample=True)])
def test_processors_get_the_history_of_each_visited_node(verify):
    """
    A batch of one makes exactly the calls of plain `generate`: the committed text, then with one more token each.
    """
    notes = _Notes()
    for seed in range(20):
        torch.manual_seed(seed)
        visible = torch.tensor([[False, False, True, True, True]])
        rows = call_rows([notes], torch.tensor([[0, 0, 5, 6, 7]]), visible)
        draft = TableModel(TARGET.scores).grow(IRREGULAR, rows=1)
        distribution = rows.distribution(TARGET.score(draft))
        notes.seen.clear()
        walked = verify(draft, distribution, [0])
        text = [0, 0, 5, 6, 7]
        expected = [text + walked.tokens[0][:count] for count in range(len(walked.tokens[0]))]
        assert notes.seen == expected
        assert rows.sequences.lengths == [5]


@pytest.mark.parametrize(
    "processors",
    [
        [],
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)],
        [RepetitionPenaltyLogitsProcessor(1.3)],
        [FrequencyPenalty(0.7), TemperatureLogitsWarper(1.5)],
    ],
    ids=["none", "scores only", "history", "custom"],
)
def test_rows_of_a_batch_get_what_they_would_get_alone(processors: list):
    rows, vocab = 5, 8
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (rows, 4), generator=generator)
    draft = TableModel(TARGET.scores).grow(IRREGULAR, rows)
    logits = 2 * torch.randn(rows, draft.num_nodes + 1, vocab, generator=generator)
    standing = Walk.start(rows, list(range(rows)))
    for row, node in enumerate([0, 1, 2, 4, 7]):
        path = []
        while node:
            path.insert(0, node)
            node = int(draft.topology.parents[0, node])
        standing.paths[row] = path
        standing.tokens[row] = [int(draft.tokens[row, node - 1]) for node in path]

    def scores(chosen: list[int], walked: list[int]) -> torch.Tensor:
        distribution = call_rows(processors, ids[chosen]).distribution(logits[chosen])
        there = Walk([standing.paths[row] for row in chosen], [standing.tokens[row] for row in chosen])
        for place in range(len(chosen)):
            # As a walk does, ask at every node on the way.
            path, tokens = there.paths[place], there.tokens[place]
            for count in range(len(path)):
                there.paths[place], there.tokens[place] = path[:count], tokens[:count]
                distribution.scores([place], there)
            there.paths[place], there.tokens[place] = path, tokens
        return distribution.scores(walked, there)

    together = scores(list(range(rows)), list(range(rows)))
    for row in range(rows):
        alone = scores([row], [0])
        torch.testing.assert_close(together[row : row + 1], alone)
        history = torch.cat([ids[row], torch.tensor(standing.tokens[row], dtype=torch.long)])[None]
        path = standing.paths[row]
        raw = logits[row : row + 1, path[-1] if path else 0].clone()
        torch.testing.assert_close(alone, LogitsProcessorList(processors)(history, raw))
