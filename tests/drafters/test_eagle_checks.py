"""Heads that cannot draft for a target, and default trees for small draft vocabularies."""

from __future__ import annotations

import pytest
from support.heads import tiny_head
from support.models import prompts, tiny_model

from hf_specdec import EagleConfig
from hf_specdec.drafters import EagleDrafter


def test_a_draft_vocabulary_needs_an_lm_head() -> None:
    for options in ({"has_lm_head": False}, {"eagle_version": 1}):
        with pytest.raises(ValueError, match="`draft_vocab_size`=20 with `has_lm_head=False`: .* all 32000 tokens"):
            EagleConfig(draft_vocab_size=20, **options)
    assert EagleConfig(eagle_version=1, has_lm_head=True, draft_vocab_size=20).num_draft_tokens == 20


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
