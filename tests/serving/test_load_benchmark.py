"""`benchmarks/serving_load.py`: what it makes of the times that it has measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


for package in ("openai", "rich"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "serving_load.py"
    spec = importlib.util.spec_from_file_location("serving_load", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_load"] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_figures(benchmark: ModuleType) -> None:
    timings = [benchmark.Timing(5, [0.2, 0.3, 0.6]), benchmark.Timing(3, [0.4, 0.5, 0.6])]
    before = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 4, "num_accepted_tokens_per_pos_0": 4}
    after = {
        "num_drafts": 20,
        "num_draft_tokens": 70,
        "num_accepted_tokens": 14,
        "num_accepted_tokens_per_pos_0": 11,
        "num_accepted_tokens_per_pos_1": 3,
    }
    figures = benchmark.summary(2.0, timings, before, after)
    assert figures["requests_per_second"] == 1.0 and figures["tokens_per_second"] == 4.0
    assert figures["mean_acceptance_length"] == 2.0 and figures["draft_acceptance_rate"] == 0.25
    assert figures["acceptance_per_position"] == [0.7, 0.3]
    assert figures["ttft_ms"]["mean"] == pytest.approx(300)
    assert figures["tpot_ms"] == pytest.approx({"mean": 100, "median": 100, "p99": 100})
    assert figures["itl_ms"] == pytest.approx({"mean": 150, "median": 100, "p99": 300})


def test_servers_without_counters_and_without_drafts(benchmark: ModuleType) -> None:
    timings = [benchmark.Timing(1, [0.2])]
    theirs = benchmark.summary(1.0, timings, {}, {})
    assert theirs["mean_acceptance_length"] is None and theirs["itl_ms"]["p99"] == 0.0
    counts = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 3.0)
    plain = benchmark.summary(1.0, timings, counts, counts)
    assert plain["mean_acceptance_length"] == 1.0 and plain["draft_acceptance_rate"] is None
