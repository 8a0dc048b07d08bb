"""Blocks after many anchors at once, as training runs them, against the blocks that drafting runs one by one."""

from __future__ import annotations

import pytest
import torch
from support.blocks import Blocks, block_head
from support.eagle import features_of
from support.goldens import trained_target
from support.random_blocks import HEADS, drafted, random_block_head

from hf_specdec import BlockHead
from hf_specdec.block import anchored
from hf_specdec.block.anchored import blocks_after
from hf_specdec.training.blocks import conditioned_logits


TOLERANCE = 1e-5
LENGTH = 40


@torch.no_grad()
def check_rows(head: BlockHead, texts: list[torch.Tensor], anchors: list[list[int]]) -> None:
    """Texts of one row, `[1, tokens]` each, with anchors in each: what training makes of them, and drafting."""
    target, firsts = trained_target(), [0]
    for text in texts:
        firsts.append(firsts[-1] + text.shape[1])
    row = torch.cat(texts, dim=1)
    places = torch.tensor([[first + place for first, of in zip(firsts, anchors, strict=False) for place in of]])
    states = blocks_after(
        head,
        torch.cat([features_of(head, text) for text in texts], dim=1),
        row,
        places,
        target.get_input_embeddings(),
        position_ids=torch.cat([torch.arange(text.shape[1]) for text in texts])[None],
        segment_ids=torch.cat([torch.full_like(text[0], index) for index, text in enumerate(texts)])[None],
    )
    found = iter(states[0])
    for text, of in zip(texts, anchors, strict=True):
        for place in of:
            block = next(found)
            expected = drafted(head, text, place)
            torch.testing.assert_close(block, expected[0], atol=TOLERANCE, rtol=TOLERANCE)
            predicting = block[None, head.first_row :]
            known = min(head.num_drafts, text.shape[1] - place)
            parents = text[:, place : place + known]
            base = head.compute_logits(predicting, target.lm_head)
            torch.testing.assert_close(base[0], expected[1], atol=TOLERANCE, rtol=TOLERANCE)
            given = conditioned_logits(head, predicting[:, :known], parents, target.lm_head)
            torch.testing.assert_close(given[0], expected[2], atol=TOLERANCE, rtol=TOLERANCE)
            if expected[3] is not None:
                confidence = head.confidence_logits(predicting[:, :known], parents)
                torch.testing.assert_close(confidence[0], expected[3], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("piece", [2**23, 1])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.some_cases(8)
def test_a_training_row_is_the_row_of_drafting(kind: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(anchored._MASK_AT_ONCE, "cpu", piece)
    check_rows(random_block_head(**HEADS[kind]), [torch.randint(5, 512, (1, LENGTH))], [[1, 2, 7, 8, 20, 33, 39]])


@pytest.mark.parametrize("golden", ["dflash", "jetspec", "dspark"])
def test_so_it_is_of_trained_heads(golden: str) -> None:
    check_rows(block_head(golden), [torch.randint(5, 512, (1, LENGTH))], [[1, 20, 33]])


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "windows"])
def test_packed_texts_do_not_see_each_other(kind: str) -> None:
    texts = [torch.randint(5, 512, (1, length)) for length in (9, 25, 12)]
    check_rows(random_block_head(**HEADS[kind]), texts, [[1, 5, 8], [1, 2, 24], [3, 6]])


def test_texts_of_a_batch() -> None:
    """Each with its own anchors."""
    head, target = random_block_head(), trained_target()
    ids, anchors = torch.randint(5, 512, (3, LENGTH)), torch.tensor([[1, 9], [4, 30], [17, 18]])
    features = torch.cat([features_of(head, text[None]) for text in ids])
    with torch.no_grad():
        states = blocks_after(head, features, ids, anchors, target.get_input_embeddings())
    for text, places, blocks in zip(ids, anchors.tolist(), states, strict=True):
        for place, block in zip(places, blocks, strict=True):
            expected = drafted(head, text[None], place)[0]
            torch.testing.assert_close(block, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_attention_is_given_back() -> None:
    head = random_block_head()
    before = head.config.text_config._attn_implementation
    check_rows(head, [torch.randint(5, 512, (1, 12))], [[3]])
    assert head.config.text_config._attn_implementation == before


@pytest.mark.parametrize("golden", ["dflash2", "peagle"])
@torch.no_grad()
def test_kinds_that_are_not_trained(golden: str) -> None:
    """The doctor runs them so, too: convolutions within each block, and P-EAGLE's last row with a feature."""
    head, text, anchors = block_head(golden), torch.randint(5, 512, (1, LENGTH)), [3, 4, 17]
    embed = trained_target().get_input_embeddings()
    found = blocks_after(head, features_of(head, text), text, torch.tensor([anchors]), embed)
    for states, anchor in zip(found[0], anchors, strict=True):
        blocks = Blocks(head, text)
        blocks.after(anchor)
        torch.testing.assert_close(states, blocks.states, atol=TOLERANCE, rtol=TOLERANCE)
