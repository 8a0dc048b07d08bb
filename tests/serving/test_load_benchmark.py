"""What the load benchmarks make of the times that they have measured, and the one without a server on a trial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from load_figures import Timing, summary


GOLDENS = Path(__file__).parents[1] / "goldens"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_figures() -> None:
    timings = [Timing(5, [0.2, 0.3, 0.6]), Timing(3, [0.4, 0.5, 0.6])]
    before = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 4, "num_accepted_tokens_per_pos_0": 4}
    after = {
        "num_drafts": 20,
        "num_draft_tokens": 70,
        "num_accepted_tokens": 14,
        "num_accepted_tokens_per_pos_0": 11,
        "num_accepted_tokens_per_pos_1": 3,
    }
    figures = summary(2.0, timings, before, after)
    assert figures["requests_per_second"] == 1.0 and figures["tokens_per_second"] == 4.0
    assert figures["mean_acceptance_length"] == 2.0 and figures["draft_acceptance_rate"] == 0.25
    assert figures["acceptance_per_position"] == [0.7, 0.3]
    assert figures["ttft_ms"]["mean"] == pytest.approx(300)
    assert figures["tpot_ms"] == pytest.approx({"mean": 100, "median": 100, "p99": 100})
    assert figures["itl_ms"] == pytest.approx({"mean": 150, "median": 100, "p99": 300})


def test_servers_without_counters_and_without_drafts() -> None:
    timings = [Timing(1, [0.2])]
    theirs = summary(1.0, timings, {}, {})
    assert theirs["mean_acceptance_length"] is None and theirs["itl_ms"]["p99"] == 0.0
    counts = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 3.0)
    plain = summary(1.0, timings, counts, counts)
    assert plain["mean_acceptance_length"] == 1.0 and plain["draft_acceptance_rate"] is None


def trial(script: str, *options: str) -> dict:
    """The JSON line that a script prints for the tiny target and its head."""
    models = [
        "--target",
        str(GOLDENS / "tiny_target"),
        "--draft",
        str(GOLDENS / "safeailab_eagle3"),
        "--device",
        "cpu",
    ]
    same = ["--num-blocks", "100", "--prompts", "random", "--tree", "dynamic:3,3,6"]
    command = [sys.executable, str(BENCHMARKS / script), *models, *same]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_load_on_a_manager() -> None:
    options = [
        "--concurrency",
        "3",
        "--temperature",
        "0",
        "--input-len",
        "20",
        "--output-len",
        "12",
        "--seconds",
        "60",
        "--rounds",
        "2",
    ]
    found = trial("manager_load.py", *options)["results"]
    assert [result["contender"] for result in found] == ["plain", "off", "auto", "tree", "transformers"]
    for result in found:
        assert "error" not in result and not result["was_cut"]
        assert (result["requests"], result["same_texts"]) == (6, 1.0)
        assert len(result["tokens_per_second_of_rounds"]) == 2 and result["over_first"] > 0
    assert found[0]["over_first"] == 1.0
    _, off, _, tree, theirs = (result["mean_acceptance_length"] for result in found)
    assert off == 1.0 and tree > 1.5 and theirs is None


@pytest.mark.slow
def test_a_load_that_rises_and_falls(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "switch.png"
    options = ["--open", "1", "6", "1", "--limit", "2", "--phase-seconds", "4", "--output-len", "24"]
    found = trial("load_switch.py", *options, "--interval", "0.25", "--input-len", "20", "--output", str(picture))
    assert picture.stat().st_size > 10_000
    low, high, again = found["phases"]["by load"]
    assert high["share_with_speculation"] < 0.5 < min(low["share_with_speculation"], again["share_with_speculation"])
    assert low["acceptance_length"] > 1.5 and again["acceptance_length"] > 1.5
    assert all(phase["acceptance_length"] is None for phase in found["phases"]["never"])


@pytest.mark.slow
def test_the_hosts_part_of_a_load() -> None:
    options = ["--concurrency", "1", "3", "--rounds", "1", "--output-len", "20"]
    command = [sys.executable, str(BENCHMARKS / "host_time.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [(one["concurrency"], one["contender"]) for one in results] == [
        (concurrency, name) for concurrency in (1, 3) for name in ("plain", "off")
    ]
    for one in results:
        assert 0 <= one["idle"] < 1 and one["itl_ms"] > 2.8 and one["tokens_per_second"] < 1e3
