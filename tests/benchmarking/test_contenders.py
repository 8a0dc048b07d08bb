"""Ways to call `generate`."""

from __future__ import annotations

import pytest
import torch
from support.heads import trained_head
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import NgramDraft, TokenTree
from hf_specdec.benchmarking.contenders import (
    BASELINES,
    baseline,
    speculative,
    speculative_with_all,
)


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
