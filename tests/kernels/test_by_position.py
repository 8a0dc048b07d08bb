"""
Texts whose random numbers belong to positions, by the kernels' operators: children and the target's tokens are drawn
by one noise. Against the enumerated distribution, and with one seed always the same text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE, Fit, fit
from support.tables import DRAFTS_OF_TABLES, TREES_OF_TABLES, TableModel

from hf_specdec.drafters import growth
from hf_specdec.trees import DraftTree
from hf_specdec.verification import DeviceNoise
from hf_specdec_kernels import Walks, chosen_walk, draw_children, exponential_noise


ROWS, LENGTH, VOCAB, START = 8_000, 3, 8, 70_000
TARGET = TableModel.random(4, VOCAB, 1.5, seed=20)
DRAFTS = {name: make(TARGET, 24) for name, make in DRAFTS_OF_TABLES.items()}


def noise_of(rows: int, seed: int = 0) -> DeviceNoise:
    """The noise of texts that are `START` tokens long; seeds a bit apart, as in the worst case."""
    return DeviceNoise(torch.arange(seed, seed + rows), torch.full((rows,), START))


def drafted(draft: TableModel, tree: str, noise: DeviceNoise | None, rows: int = ROWS) -> DraftTree:
    """Trees drawn by a noise; None: trees of the best tokens."""
    if noise is None:
        return draft.grow_best(TREES_OF_TABLES[tree], rows)
    warp = growth.Tempered(torch.ones(rows), noise=noise)
    return growth.grow(TREES_OF_TABLES[tree], draft.root.expand(rows, -1).contiguous(), draft.run_level, 99, warp)


def verified(draft: DraftTree, noise: DeviceNoise) -> Walks:
    """The walks along the tokens that the target draws by a noise."""
    tokens = draft.tokens if draft.valid is None else draft.tokens.masked_fill(~draft.valid, -1)
    tokens = torch.nn.functional.pad(tokens, (1, 0), value=-1)
    chosen = noise.draw_at_nodes(TARGET.score(draft), draft.topology.depths)
    return chosen_walk(chosen, tokens, draft.topology.parents, max_depth=draft.topology.depth)


def texts_of(draft: DraftTree, walks: Walks) -> list[list[int]]:
    along = torch.nn.functional.pad(draft.tokens, (1, 0)).gather(1, walks.path).tolist()
    rows = zip(along, walks.accepted.tolist(), walks.next_tokens.tolist(), strict=True)
    return [[*row[1 : accepted + 1], last] for row, accepted, last in rows]


def plain_texts(noise: DeviceNoise, rows: int = ROWS) -> torch.Tensor:
    """What the target draws token by token, `[rows, 4]`."""
    text = torch.zeros(rows, 1, dtype=torch.long)
    for level in range(4):
        scores = TARGET.scores[level, text[:, -1]]
        gumbel = -exponential_noise(noise.keys, noise.lengths[:, None] + level, VOCAB)[:, 0].log()
        text = torch.cat([text, (scores.log_softmax(-1) + gumbel).argmax(-1, keepdim=True)], dim=1)
    return text[:, 1:]


@pytest.mark.parametrize("draft", [*DRAFTS, "best tokens"])
@pytest.mark.parametrize("tree", TREES_OF_TABLES)
def test_every_tree_has_the_plain_text(tree: str, draft: str) -> None:
    noise = noise_of(2_000)
    drawn_by = None if draft == "best tokens" else noise
    trees = drafted(DRAFTS["close" if drawn_by is None else draft], tree, drawn_by, 2_000)
    walks = verified(trees, noise)
    expected = plain_texts(noise, 2_000).tolist()
    assert all(text == plain[: len(text)] for text, plain in zip(texts_of(trees, walks), expected, strict=True))
    assert walks.accepted.sum() > 0


def found_fit(noise: DeviceNoise, tree: str = "irregular", drawn_by: DeviceNoise | None = None) -> Fit:
    trees = drafted(DRAFTS["close"], tree, noise if drawn_by is None else drawn_by)
    texts = TARGET.finish(texts_of(trees, verified(trees, noise)), LENGTH)
    return fit(texts, TARGET.joint(LENGTH))


@pytest.mark.parametrize("tree", TREES_OF_TABLES)
def test_the_distribution(tree: str) -> None:
    found = found_fit(noise_of(ROWS), tree)
    assert found.p_value > SIGNIFICANCE and found.detectable < 0.08


def _one_position(noise: DeviceNoise) -> Any:
    """The noise of one position at all levels of a path."""
    return lambda *args, positions, **options: draw_children(*args, positions=noise.lengths[:, None], **options)


def _without_tokens(noise: DeviceNoise) -> Any:
    """The same noise for all tokens: none at all."""
    return lambda logits, *args, **options: draw_children(
        logits, *args, **options | {"token_ids": torch.zeros(logits.shape[2], dtype=torch.long)}
    )


@pytest.mark.parametrize("wrong", [_one_position, _without_tokens])
def test_wrong_noise_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = noise_of(ROWS)
    monkeypatch.setattr("hf_specdec_kernels.draw_children", wrong(noise))
    assert found_fit(noise).p_value < 1e-6


def test_rows_with_one_seed_are_found() -> None:
    assert found_fit(DeviceNoise(torch.arange(ROWS) % 400, torch.full((ROWS,), START))).p_value < 1e-6


def test_another_noise_for_the_draft_is_exact_and_accepts_less() -> None:
    noise, other = noise_of(ROWS), noise_of(ROWS, seed=10**6)
    assert found_fit(noise, drawn_by=other).p_value > SIGNIFICANCE
    accepted = [
        verified(drafted(DRAFTS["close"], "chain", own), noise).accepted.float().mean() for own in (noise, other)
    ]
    assert accepted[0] > 1.5 * accepted[1]


def test_columns_have_the_noise_of_their_tokens() -> None:
    """A draft of some of the target's tokens draws what the whole vocabulary would, where that is one of them."""
    ids, scores = torch.tensor([1, 4, 6, 7]), torch.randn(50, 1, VOCAB)
    noise = DeviceNoise(torch.arange(50), torch.full((50,), 9), ids)
    hidden = torch.full_like(scores, -torch.inf).index_copy(2, ids, scores[..., ids])
    whole = draw_children(hidden, 4, noise.keys, positions=torch.full((50, 1), 11)).tokens
    assert torch.equal(ids[draw_children(scores[..., ids].contiguous(), 4, **noise.of_level(2)).tokens], whole)
