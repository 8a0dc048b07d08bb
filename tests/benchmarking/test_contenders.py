"""Ways to call `generate`."""

from __future__ import annotations

import pytest
import torch
from support.heads import trained_head
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, TokenTree
from hf_specdec.benchmarking.contenders import (
    BASELINES,
    baseline,
    parse_tree,
    shorten,
    speculative,
    speculative_with_all,
)
from hf_specdec.trees import AutoTree


@pytest.mark.parametrize(
    "text, tree",
    [
        ("default", None),
        ("auto", AutoTree()),
        ("[(0,), (0, 0)]", TokenTree.chain(2)),
        ("chain:2", TokenTree.chain(2)),
        (" branching:2,1 ", TokenTree.from_branching((2, 1))),
        ("dynamic:3,2,6", DynamicTree(depth=3, top_k=2, num_nodes=6)),
    ],
)
def test_trees(text: str, tree: object) -> None:
    assert parse_tree(text) == tree


@pytest.mark.parametrize(
    "text, message",
    [
        ("chain:x", "'chain:x' is no tree. Write default, auto"),
        ("chain:2,3", "is no tree"),
        ("dynamic:3,2", "is no tree"),
        ("bush:3", "is no tree"),
        ("dynamic:3,2,60", "make only 10 candidates"),
        ("chain:0", "`length`: 0 is not an integer from 1"),
        ("[(0, 0)]", "not its parent"),
    ],
)
def test_what_is_no_tree(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tree(text)


def test_long_trees_are_named_by_their_size() -> None:
    assert shorten("chain:5") == "chain:5"
    assert shorten(str(TokenTree.from_branching((4, 2, 1)))) == "of 20, depth 3"


def test_different_trees_have_different_names(draft: PreTrainedModel) -> None:
    trees = [str(TokenTree.from_branching(branching)) for branching in ((4, 2), (6, 1), (4, 2, 1))]
    names = [contender.name for contender in speculative_with_all(draft, ["chain:3", *trees])]
    assert names == ["tree chain:3", "tree of 12, depth 2", "tree of 12, depth 2 #2", "tree of 20, depth 3"]


def test_assisted_generation_drafts_chains_of_five(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """And the draft's own settings come back, on errors too."""
    before = draft.generation_config
    contender = baseline("assisted", draft)
    with contender.settings() as options:
        assert options == {"assistant_model": draft}
        assert draft.generation_config.num_assistant_tokens == 5
        assert draft.generation_config.num_assistant_tokens_schedule == "constant"
    assert draft.generation_config is before
    with pytest.raises(KeyboardInterrupt), contender.settings():
        raise KeyboardInterrupt
    assert draft.generation_config is before


def test_baselines_that_there_are_not(draft: PreTrainedModel) -> None:
    assert [baseline(name, draft).is_ours for name in BASELINES] == [False] * 4
    for assistant in (NgramDraft(), trained_head()):
        with pytest.raises(ValueError, match="needs a draft model"):
            baseline("assisted", assistant)
    with pytest.raises(ValueError, match="'vllm' is no baseline. There are eager"):
        baseline("vllm", draft)


def test_ours_speculate(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    contender = speculative(draft, "chain:2")
    assert contender.is_ours and contender.options["speculative_config"].tree == TokenTree.chain(2)
    with contender.settings() as options:
        target.generate(torch.tensor([[3, 5, 7]]), **options, max_new_tokens=8, do_sample=False)
    assert hf_specdec.last_metrics().num_draft_tokens > 0
