"""Heads that cannot draft for a target, and default trees for small draft vocabularies."""

from __future__ import annotations

import pytest
import torch
from support.heads import tiny_head
from support.models import prompts, tiny_model

import hf_specdec
from hf_specdec.drafters import EagleDrafter


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_vocabulary_of_the_targets_lm_head(do_sample: bool) -> None:
    """A head that borrows rows drafts what a head with copies of them drafts; the rows follow the target's weights."""
    target = tiny_model("llama")
    own = tiny_head(target, draft_vocab_size=30)
    borrowing = tiny_head(target, draft_vocab_size=30, has_lm_head=False)
    borrowing.load_state_dict(own.state_dict(), strict=False)
    assert borrowing.lm_head is None and torch.equal(borrowing.target_ids, own.target_ids)
    found = []
    for factor in (1.0, 0.5):
        with torch.no_grad():
            target.lm_head.weight.mul_(factor)
            own.lm_head.weight.copy_(target.lm_head.weight[own.target_ids])
        for head in (own, borrowing):
            torch.manual_seed(0)
            options = {"do_sample": do_sample, "max_new_tokens": 20} | ({"top_k": 0} if do_sample else {})
            output = target.generate(**prompts(2, 7), **options, assistant_model=head, tree="[(0,), (1,), (0, 0)]")
            found.append((output.tolist(), hf_specdec.last_metrics().accepted_per_step))
    assert found[0] == found[1] and found[2] == found[3]
    assert not do_sample or found[0] != found[2]


@pytest.mark.parametrize("eagle_version", [1, 3])
def test_a_head_of_another_width_without_an_lm_head(eagle_version: int) -> None:
    """Its own embeddings are not enough: the target's lm_head cannot read its states."""
    target = tiny_model("llama")
    size = target.config.hidden_size
    head = tiny_head(
        target,
        eagle_version=eagle_version,
        layers={"hidden_size": size // 2},
        target_hidden_size=size,
        has_embeddings=True,
        has_lm_head=False,
    )
    with pytest.raises(ValueError, match=f"`assistant_model`: .* hidden size {size // 2} and no lm_head"):
        target.generate(**prompts(1, 5), assistant_model=head)


@pytest.mark.parametrize("draft_vocab_size", [1, 2, 3])
def test_a_default_tree_for_few_draft_tokens(draft_vocab_size: int) -> None:
    target = tiny_model("llama")
    head = tiny_head(target, draft_vocab_size=draft_vocab_size)
    text = target.generate(**prompts(1, 5), assistant_model=head, max_new_tokens=12, do_sample=False)
    assert text.tolist() == target.generate(**prompts(1, 5), max_new_tokens=12, do_sample=False).tolist()


def test_default_trees_on_an_accelerator() -> None:
    for size, nodes in ((1, 8), (2, 30), (61, 59)):
        drafter = EagleDrafter(tiny_head(tiny_model("llama"), draft_vocab_size=size).to("meta"))
        assert drafter.default_tree.num_nodes == nodes and drafter.default_tree.top_k == min(size, 10)
