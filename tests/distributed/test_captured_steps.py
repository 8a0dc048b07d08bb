"""
Captured steps of a target with `tp_plan="auto"` in two processes: by a stand-in on the CPU with gloo, and on two GPUs
with nccl where there are two (`python -m pytest tests/distributed -k cuda -rs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import ragged_prompts, text_alone
from support.heads import save_models
from support.models import prompts, tiny_model
from support.parity import plain_text
from support.ranks import results_of_ranks
from transformers import PreTrainedModel


SCRIPT = Path(__file__).with_name("captured_steps.py")
pytestmark = pytest.mark.slow  # processes that import torch and transformers, as test_tensor_parallel.py has, too
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(vocab_size=64, dtype=torch.float32)  # 5.17 wants to share it out evenly


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def found(request: pytest.FixtureRequest, target: PreTrainedModel, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What both ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    save_models(target, folder)
    return [result["texts"] for result in results_of_ranks(SCRIPT, folder, request.param)]


def test_ranks_agree(found: list[dict[str, Any]]) -> None:
    """Although each draws numbers of its own, and drafts by other weights."""
    first, second = found
    for name, result in first.items():
        for key in ("text", "accepted", "replays"):
            assert second[name][key] == result[key], (name, key)


def test_steps_are_captured(found: list[dict[str, Any]]) -> None:
    for name, result in found[0].items():
        if "failing" not in name:
            assert sum(map(sum, result["accepted"])) > 0 or "head" in name, name  # which is a random one
            assert result["captures"] > 0 and result["replays"] > 0, name
            assert result["warnings"] == [], name


def test_texts_are_those_of_plain_generate(found: list[dict[str, Any]], target: PreTrainedModel) -> None:
    expected = plain_text(target, prompts(2, 12, padding=True), max_new_tokens=8).tolist()
    alone = [text_alone(target, prompt, max_new_tokens=8) for prompt in ragged_prompts((9, 1, 30))]
    for name, result in found[0].items():
        if "greedy" in name:
            assert result["text"] == (alone if name.startswith("batch") else expected), name


def test_a_capture_that_fails_on_one_rank_ends_those_of_all(found: list[dict[str, Any]]) -> None:
    for result, reason in zip(found, ("another rank", "the capture has failed"), strict=True):
        result = result["batch, greedy, failing on one rank"]
        assert result["replays"] == 0
        assert any(reason in message for message in result["warnings"]), result["warnings"]
