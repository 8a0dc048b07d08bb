"""Block heads of every format against numbers that the reference implementations computed (tests/goldens)."""

import pytest
import torch
from support.blocks import (
    ALL,
    CONTEXT,
    STEPS,
    Blocks,
    draft_chain,
    features_of,
    golden_blocks,
    parents_of,
    shared_head,
)
from support.eagle import arrays
from support.goldens import trained_target


TOLERANCE = 1e-4
BOUNDARIES = {"dflash": [2, 6], "jetspec": [2, 6], "dspark": [2, 4, 6], "dflash2": [2, 4, 6], "peagle": [2, 4, 5]}


@pytest.mark.parametrize("golden", ALL)
def test_features_are_the_hidden_states_at_the_boundaries(golden):
    expected, head = arrays(golden), shared_head(golden)
    assert head.config.aux_boundaries(trained_target().config.num_hidden_layers) == BOUNDARIES[golden]
    captured = [expected[key] for key in sorted(expected) if key.startswith("aux_")]
    if captured:
        found = features_of(head, expected["input_ids"])
        torch.testing.assert_close(found, torch.cat(captured, dim=-1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("golden", CONTEXT)
def test_context(golden):
    expected, head = arrays(golden), shared_head(golden)
    context = head.fuse(features_of(head, expected["input_ids"]))
    torch.testing.assert_close(context, expected["context"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("golden", CONTEXT)
def test_tokens_of_a_block(golden):
    expected, head = arrays(golden), shared_head(golden)
    assert torch.equal(head.block_tokens(expected["sample_token"][0]), expected["block_ids"])
    rows = expected["block_ids"].shape[1]
    assert head.num_drafts == expected["spec_draft_tokens"].shape[1] == rows - head.first_row
    assert head.block_mask("cpu").tolist() == [
        [key <= row or golden != "jetspec" for key in range(rows)] for row in range(rows)
    ]


def test_tokens_of_a_block_of_masks():
    head = shared_head("peagle")
    assert head.block_tokens(torch.tensor([5, 6])).tolist() == [[13] * 4] * 2
    assert head.num_drafts == 5
    assert torch.equal(head.block_mask("cpu"), torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("golden", ALL)
def test_hidden_states_and_logits(golden):
    """Over several steps, so that context is appended and the rows of blocks are dropped between them."""
    found, expected = golden_blocks(shared_head(golden), golden), arrays(golden)
    assert {name for name in expected if name.startswith(("block_h", "block_l", "chain_l", "chain_s"))} == set(found)
    for name, array in found.items():
        torch.testing.assert_close(array, expected[name], atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("golden", ALL)
def test_drafted_tokens_of_every_step(golden):
    expected, head = arrays(golden), shared_head(golden)
    text = expected["greedy_ids"]
    blocks = Blocks(head, text)
    for step, prefix in enumerate(expected["spec_prefix_len"].tolist()):
        drafted = draft_chain(head, *blocks.after(prefix), int(text[0, prefix]))
        assert drafted == expected["spec_draft_tokens"][step].tolist(), step
        rest = text[0, prefix + 1 :].tolist()
        same = [one == other for one, other in zip(drafted, rest, strict=False)]
        assert (same + [False]).index(False) == expected["spec_accept_length"][step]


def test_confidence():
    expected, head = arrays("dspark"), shared_head("dspark")
    blocks = Blocks(head, expected["greedy_ids"])
    for step, prefix in enumerate(expected["spec_prefix_len"].tolist()):
        states, _ = blocks.after(prefix)
        found = head.confidence_logits(states[None], parents_of("dspark", step))
        torch.testing.assert_close(found[0], expected["confidence_logits"][step], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("golden", ["dflash", "dflash2", "peagle"])
def test_no_confidence(golden):
    head = shared_head(golden)
    assert head.confidence_logits(torch.zeros(1, 1, 64), torch.zeros(1, 1, dtype=torch.long)) is None
    assert head.conditions == (golden == "dflash2")


def test_candidates():
    """Scores are those of the most likely tokens alone."""
    expected, head = arrays("dflash2"), shared_head("dflash2")
    blocks = Blocks(head, expected["greedy_ids"])
    for step, prefix in enumerate(expected["spec_prefix_len"].tolist()[:STEPS]):
        states, logits = blocks.after(prefix)
        scores, carried = head.conditional_logits(logits[None], states[None], parents_of("dflash2", step))
        assert carried is None
        found = scores[0].isfinite().nonzero()[:, 1].view(len(logits), -1)
        assert torch.equal(found, expected["chain_candidates"][step].sort(dim=-1).values)
        assert torch.equal(logits.topk(16).indices, expected["chain_candidates"][step])


def test_path_tokens_in_place_of_masks():
    expected, head = arrays("jetspec"), shared_head("jetspec")
    blocks = Blocks(head, expected["greedy_ids"])
    _, logits = blocks.after(int(expected["spec_prefix_len"][0]), fill=expected["cond_fill"])
    torch.testing.assert_close(logits, expected["cond_logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("golden", ALL)
def test_context_in_pieces(golden):
    """Catching up in several forwards is one forward: the cache holds what it should."""
    expected, head = arrays(golden), shared_head(golden)
    prefix = int(expected["spec_prefix_len"][0])
    pieces = Blocks(head, expected["greedy_ids"])
    for end in (3, 4, prefix - 1):
        pieces.after(end)
    _, logits = pieces.after(prefix)
    torch.testing.assert_close(logits, expected["block_logits"][0], atol=TOLERANCE, rtol=0)
