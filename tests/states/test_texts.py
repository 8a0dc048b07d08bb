"""Targets with recurrent or convolutional layers write, with any tree, what they write without."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support.batches import accepted
from support.hybrids import HYBRIDS, ONE_OF_EACH, Oracle, hybrid, is_known, padded
from support.models import noisy_copy
from support.parity import expected_acceptance
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, TokenTree
from hf_specdec.batching.limits import Limits
from hf_specdec.states import groups


def texts_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int) -> list[list[int]]:
    return model.generate(**inputs, do_sample=False, max_new_tokens=count).tolist()


def assert_exact(model: PreTrainedModel, batch_size: int, seed: int, **options: Any) -> None:
    """Asserts that a call with random trees, and steps without, gives the plain text."""
    inputs = padded(batch_size, seed=seed)
    expected = texts_of(model, inputs, 24)
    outputs = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=24,
        assistant_model=Oracle(expected, seed),
        **{"tree": Oracle.default_tree, **options},
    )
    assert outputs.tolist() == expected
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.some_cases(4)
def test_random_trees(family: str, batch_size: int) -> None:
    if not is_known(family):
        pytest.skip("this release has no such family")
    assert_exact(hybrid(family), batch_size, seed=3)


@pytest.mark.parametrize("family", (*ONE_OF_EACH, "jamba", "mamba"))
@pytest.mark.some_cases(3)
def test_prompts_in_chunks(family: str) -> None:
    assert_exact(hybrid(family), 3, seed=1, prefill_chunk_size=5)


@pytest.mark.parametrize("family", (*ONE_OF_EACH, "nemotron_h", "mamba2"))
@pytest.mark.some_cases(1)
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
            continuous_batching_config=Limits(**limits),
        )
        found = [output.prompt_ids + output.generated_tokens for output in outputs.values()]
        assert found == whole


@pytest.mark.parametrize("family", ["kimi_linear", "zamba"])
@pytest.mark.some_cases(1)
def test_rows_in_groups(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are followed one after the other where they would take too much memory."""
    monkeypatch.setattr(groups, "MOST_BYTES", 1)
    model, draft = hybrid(family), noisy_copy(hybrid(family), 0.03)
    inputs = padded(3, seed=1)
    expected = texts_of(model, inputs, 16)
    outputs = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=16,
        assistant_model=draft,
        tree=DynamicTree(depth=3, top_k=2, num_nodes=5),
    )
    assert outputs.tolist() == expected
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize(
    "family, batch_size",
    # Inkling scales queries by their slot, which padding shifts.
    [*product(ONE_OF_EACH, (1, 3)), ("inkling_text", 1)],
)
@pytest.mark.some_cases(2)
def test_drafts_with_states(family: str, batch_size: int) -> None:
    """A draft accepts what its plain text says it must: it reads the accepted path, not what it had drafted."""
    model, draft = hybrid(family), noisy_copy(hybrid(family), 0.03)
    inputs = padded(batch_size, seed=1)
    expected = texts_of(model, inputs, 24)
    for tree in ("[(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]", DynamicTree(depth=3, top_k=2, num_nodes=6)):
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_model=draft, tree=tree)
        assert outputs.tolist() == expected
        metrics = hf_specdec.last_metrics()
        assert metrics.num_accepted_tokens > 0
        if isinstance(tree, str):
            pads = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
            for row, found in enumerate(metrics.accepted_per_step):
                wanted = expected_acceptance(draft, outputs[row], 12, TokenTree.parse(tree), pads[row])
                assert found[: len(wanted)] == wanted


@pytest.mark.parametrize("family", ("qwen3_5_text", "zamba", "jamba", "mamba"))
@pytest.mark.some_cases(1)
def test_drafts_that_read_prompts_in_chunks(family: str) -> None:
    """They accept what they accept without chunks, of which the last has one token."""
    model, draft = hybrid(family), noisy_copy(hybrid(family), 0.03)
    inputs, found = padded(3, length=13, seed=1), []
    for chunk_size in (None, 4):
        options = {"max_new_tokens": 16, "tree": "[(0,), (1,), (0, 0)]", "prefill_chunk_size": chunk_size}
        text = model.generate(**inputs, do_sample=False, assistant_model=draft, **options).tolist()
        found.append((text, hf_specdec.last_metrics().accepted_per_step))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.some_cases(1)
def test_drafts_with_states_in_flight(family: str) -> None:
    model, draft = hybrid(family), noisy_copy(hybrid(family), 0.03)
    prompts = [torch.randint(3, 60, (length,)).tolist() for length in (5, 30, 1)]
    whole = [texts_of(model, {"input_ids": torch.tensor([prompt])}, 16)[0] for prompt in prompts]
    outputs = model.generate_batch(prompts, assistant_model=draft, max_new_tokens=16, tree="[(0,), (1,), (0, 0)]")
    assert [output.prompt_ids + output.generated_tokens for output in outputs.values()] == whole
    assert sum(map(accepted, outputs.values())) > 0
