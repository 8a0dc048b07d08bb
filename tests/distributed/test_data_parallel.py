"""A sharded target (FSDP) in two processes with prompts of their own: gloo on the CPU, nccl where two GPUs are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import results_of_ranks


SCRIPT = Path(__file__).with_name("data_parallel.py")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def found(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, Any]]:
    return results_of_ranks(SCRIPT, tmp_path_factory.mktemp("ranks"), request.param)


def test_every_rank_writes_its_own_texts(found: list[dict[str, Any]]) -> None:
    assert [len(result["expected"][0]) for result in found] == [8 + 20, 13 + 35]
    for result in found:
        for name in ("draft model", "automatic tree", "n-grams", "head"):
            assert result[name] == result["expected"], name
        assert result["draft model, accepted"] > 0
    assert found[0]["metrics are this rank's own"] != found[1]["metrics are this rank's own"]


@pytest.mark.parametrize("family", ["qwen3_5_text", "zaya"])
def test_rows_that_end_early(found: list[dict[str, Any]], family: str) -> None:
    """The rank that has ended first joins the other's forwards, among them the one that reads its padding."""
    first, second = (result[f"{family}, ending early"] for result in found)
    assert first["is_plain"] and second["is_plain"]
    assert max(first["new"]) < max(second["new"]) == 16
    assert len(set(first["new"])) > 1 < len(set(second["new"]))


def test_what_is_refused(found: list[dict[str, Any]]) -> None:
    """Both would wait for each other for ever."""
    for result in found:
        assert "Give every rank a whole one" in result["refused draft"]
        assert "`generate(…, synced_gpus=True)`" in result["refused batch"]


def test_hooks_that_shard_are_not_the_users(found: list[dict[str, Any]]) -> None:
    assert [result["foreign hooks"] for result in found] == [[], []]
