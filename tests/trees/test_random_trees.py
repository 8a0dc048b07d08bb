"""Greedy equality, and exactly the expected acceptance, for random irregular trees."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import noisy_copy, prompts, tiny_model
from support.parity import expected_acceptance, plain_text
from support.trees import paths_of_trees
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree


NEW_TOKENS = 16
PROMPT = 9


@lru_cache
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that is wrong often enough for second-best branches to matter."""
    target = tiny_model(family, attention_sharpness=3.0)
    return target, noisy_copy(target, noise=0.4)


@lru_cache
def inputs_and_text(family: str, batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs = prompts(batch_size, PROMPT, seed=10, padding=batch_size > 1)
    return inputs, plain_text(models(family)[0], inputs, max_new_tokens=NEW_TOKENS)


def check(family: str, batch_size: int, tree: TokenTree) -> list[list[int]]:
    """Generates along the tree; returns the expected acceptance, which is that of the run."""
    target, draft = models(family)
    inputs, text = inputs_and_text(family, batch_size)
    out = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft, tree=str(tree))
    assert out.tolist() == text.tolist()
    pads = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    expected = [expected_acceptance(draft, text[row], PROMPT, tree, pads[row]) for row in range(batch_size)]
    assert hf_specdec.last_metrics().accepted_per_step == expected
    return expected


@pytest.mark.parametrize("batch_size", [1, 3])
@settings(max_examples=8, deadline=None)
@given(paths=paths_of_trees())
@pytest.mark.some_cases(1)
def test_random_trees(batch_size: int, paths: list[tuple[int, ...]]) -> None:
    check("llama", batch_size, TokenTree(paths))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
@settings(max_examples=100, deadline=None)
@given(paths=paths_of_trees())
def test_many_random_trees(family: str, paths: list[tuple[int, ...]]) -> None:
    check(family, 3, TokenTree(paths))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(paths=paths_of_trees(max_nodes=20, max_rank=6))
def test_random_trees_with_a_sliding_window(paths: list[tuple[int, ...]]) -> None:
    check("mistral", 3, TokenTree(paths))


def test_the_draft_exercises_branches() -> None:
    """The trees above would show little if only best tokens were ever accepted."""
    wide = TokenTree.from_branching((5, 5))
    for batch_size in (1, 3):
        for family in ("llama", "mistral"):
            by_best = sum(map(sum, check(family, batch_size, TokenTree.chain(2))))
            by_all = sum(map(sum, check(family, batch_size, wide)))
            assert 0 < by_best < by_all


@pytest.mark.parametrize("batch_size", [1, 3])
@settings(max_examples=6, deadline=None)
@given(depth=st.integers(1, 5), top_k=st.integers(1, 4), share=st.floats(0, 1))
@pytest.mark.some_cases(1)
def test_random_dynamic_trees(batch_size: int, depth: int, top_k: int, share: float) -> None:
    candidates = top_k + (depth - 1) * top_k**2
    tree = DynamicTree(depth=depth, top_k=top_k, num_nodes=max(round(share * candidates), 1))
    target, draft = models("llama")
    inputs, text = inputs_and_text("llama", batch_size)
    out = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft, tree=tree)
    assert out.tolist() == text.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(paths=paths_of_trees(gaps=False))
def test_drawn_trees_in_greedy_calls(paths: list[tuple[int, ...]]) -> None:
    """Children drawn from the draft: by luck more or fewer are accepted, the text stays the same."""
    target, draft = models("llama")
    inputs, text = inputs_and_text("llama", 3)
    config = SpeculativeConfig(tree=paths, draft_sampling="sample")
    out = target.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft, speculative_config=config
    )
    assert out.tolist() == text.tolist()
