"""
A target with `tp_plan="auto"` in two processes: on the CPU with gloo, and on two GPUs with nccl where there are two
(`python -m pytest tests/distributed -k cuda -rs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import ragged_prompts, text_alone
from support.heads import save_models
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, plain_text
from support.ranks import results_of_ranks
from transformers import PreTrainedModel

from hf_specdec import NgramDraft


SCRIPT = Path(__file__).with_name("tensor_parallel.py")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(vocab_size=64)  # 5.17 wants to share it out evenly


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def found(request: pytest.FixtureRequest, target: PreTrainedModel, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What both ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    save_models(target, folder)
    results = results_of_ranks(SCRIPT, folder, request.param)
    backend = {"cpu": "gloo", "cuda": "nccl"}[request.param]
    assert [(result["num_ranks"], result["backend"]) for result in results] == [(2, backend)] * 2
    return results


def test_ranks_agree(found: list[dict[str, Any]]) -> None:
    """Texts, steps and the random state behind them."""
    first, second = (result["texts"] for result in found)
    assert list(first) == list(second)
    for name, result in first.items():
        assert second[name] == result, name


def test_texts_are_those_of_one_process(found: list[dict[str, Any]], target: PreTrainedModel) -> None:
    texts, inputs = found[0]["texts"], prompts(3, 12, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=16)
    penalised = plain_text(target, inputs, max_new_tokens=16, repetition_penalty=1.3)
    names = ["plain", *(name for name in texts if name.startswith("greedy"))]
    assert len(names) == 9
    for name in names:
        wanted = penalised if "penalty" in name else expected
        assert texts[name]["text"] == wanted.tolist(), name
        if "head" not in name and name != "plain":  # the head is a random one
            assert sum(map(sum, texts[name]["accepted"])) > 0, name


def test_samples_are_those_of_one_process(found: list[dict[str, Any]], target: PreTrainedModel) -> None:
    """With the random state of rank 0, by rejection and along the target."""
    draft, inputs = noisy_copy(target, 0.05), prompts(3, 12, padding=True)
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 16}
    calls = {
        "sampled, static tree": (1, draft, {"tree": IRREGULAR}),
        "sampled, n-grams": (5, NgramDraft(), {}),
        "sampled, along the target": (6, draft, {"tree": IRREGULAR, "top_k": 5, "repetition_penalty": 1.3}),
    }
    if found[0]["backend"] != "gloo":
        pytest.skip("a GPU draws other numbers")
    for name, (seed, assistant, more) in calls.items():
        torch.manual_seed(seed)
        text = target.generate(**inputs, assistant_model=assistant, **options, **more)
        assert found[0]["texts"][name]["text"] == text.tolist(), name


def test_drafts_are_those_of_rank_0(found: list[dict[str, Any]]) -> None:
    """Two of its four tokens are right, at every step until the end is near; the other ranks' never are."""
    for row in found[0]["texts"]["greedy, other drafts on every rank"]["accepted"]:
        assert row[:-2] == [2] * (len(row) - 2)


def test_all_stop_when_rank_0_does(found: list[dict[str, Any]], target: PreTrainedModel) -> None:
    for result in found:
        assert [len(row) for row in result["texts"]["other stops on every rank"]["text"]] == [20] * 3
        of_batch = result["texts"]["batch, other stops on every rank"]["text"]
        # One token at least, and 16 at most.
        assert [len(text) for text in of_batch] == [min(max(20 - len(p), 1), 16) for p in ragged_prompts()]
        assert len(result["texts"]["a clock"]["text"][0]) < 12 + 240


def test_many_requests(found: list[dict[str, Any]], target: PreTrainedModel) -> None:
    texts = found[0]["texts"]
    expected = [text_alone(target, prompt, max_new_tokens=16) for prompt in ragged_prompts()]
    names = [name for name in texts if name.startswith("batch, greedy")]
    assert len(names) == 4
    for name in names:
        assert texts[name]["text"] == expected, name
    for name in (name for name in texts if name.startswith("batch")):
        assert texts[name]["errors"] == []
        assert name == "batch, greedy, head" or sum(sum(steps[0]) for steps in texts[name]["accepted"]) > 0, name


def test_what_is_refused(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert "`generate_batch`" in result["refusals"]["add_request"]
        assert "`generate_batch`" in result["refusals"]["add_requests"]


def test_hooks_that_shard_are_not_the_users(found: list[dict[str, Any]]) -> None:
    assert [result["foreign hooks"] for result in found] == [[], []]
