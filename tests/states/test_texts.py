"""Targets with recurrent or convolutional layers write, with any tree, what they write without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hybrids import HYBRIDS, ONE_OF_EACH, Oracle, hybrid, is_known, padded
from transformers import PreTrainedModel

import hf_specdec


def texts_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int) -> list[list[int]]:
    return model.generate(**inputs, do_sample=False, max_new_tokens=count).tolist()


def assert_exact(model: PreTrainedModel, batch_size: int, seed: int, **options: Any) -> None:
    """Asserts that a call with random trees, and steps without, gives the plain text."""
    inputs = padded(batch_size, seed=seed)
    expected = texts_of(model, inputs, 24)
    outputs = model.generate(
        **inputs, do_sample=False, max_new_tokens=24, assistant_model=Oracle(expected, seed), **options
    )
    assert outputs.tolist() == expected
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", HYBRIDS)
def test_random_trees(family: str, batch_size: int) -> None:
    if not is_known(family):
        pytest.skip("this release has no such family")
    assert_exact(hybrid(family), batch_size, seed=3)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_prompts_in_chunks(family: str) -> None:
    assert_exact(hybrid(family), 3, seed=1, prefill_chunk_size=5)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_requests_in_flight(family: str) -> None:
    """Few tokens of a prompt in a step, fewer places than requests, and so few blocks that some lose theirs."""
    model = hybrid(family)
    prompts = [torch.randint(3, 60, (length,)).tolist() for length in (5, 30, 1, 12, 2)]
    whole = [texts_of(model, {"input_ids": torch.tensor([prompt])}, 16)[0] for prompt in prompts]
    for limits in ({"chunk_size": 7}, {"max_requests": 2}, {"num_blocks": 12, "block_size": 4}):
        outputs = model.generate_batch(
            prompts,
            assistant_model=Oracle(whole, 1),
            max_new_tokens=16,
            continuous_batching_config=hf_specdec.batching.limits.Limits(**limits),
        )
        found = [output.prompt_ids + output.generated_tokens for output in outputs.values()]
        assert found == whole
