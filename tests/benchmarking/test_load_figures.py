"""The figures of loads and of the examples' calls: what counts, and which of many is shown."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from load import put_load
from load_figures import Timing, summary
from manager_load import median_of, share_of_same


ROOT = Path(__file__).parents[2]


class Manager:
    """Puts out a token of each request in turn, for ever."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.wanted: dict[str, int] = {}

    def add_request(self, prompt: list[int], *, max_new_tokens: int, **options: Any) -> str:
        name = f"request {len(self.lengths)}"
        self.lengths[name], self.wanted[name] = 0, max_new_tokens
        return name

    def get_result(self, timeout: float) -> Any:
        name = min(self.lengths, key=lambda name: (self.lengths[name] >= self.wanted[name], self.lengths[name]))
        self.lengths[name] += 1
        time.sleep(0.001)
        is_finished = self.lengths[name] >= self.wanted[name]
        tokens = [7] * self.lengths[name]
        return SimpleNamespace(request_id=name, error=None, generated_tokens=tokens, is_finished=lambda: is_finished)

    def cancel_request(self, name: str) -> None:
        pass


def test_requests_that_were_cut_off_are_not_served() -> None:
    outcome = put_load(Manager(), [[5]] * 3, 10**6, 3, time.perf_counter() + 0.02)
    assert outcome.is_cut and outcome.timings
    found = summary(outcome.seconds, outcome.timings, {}, {})
    assert found["requests"] == found["requests_per_second"] == 0
    assert found["tokens_per_second"] > 0 and found["ttft_ms"]["mean"] > 0
    whole = put_load(Manager(), [[5]] * 3, 4, 3, time.perf_counter() + 60)
    found = summary(whole.seconds, whole.timings, {}, {})
    assert found["requests"] == 3 and not whole.is_cut


@pytest.mark.parametrize("count, expected", [(1, 1), (50, 50), (100, 99), (101, 100), (200, 198), (1000, 990)])
def test_of_a_hundred_the_second_largest(count: int, expected: int) -> None:
    """The 99th percentile is the smallest value that 99 % do not exceed."""
    timings = [Timing(1, [float(number)]) for number in range(1, count + 1)]
    assert summary(1.0, timings, {}, {})["ttft_ms"]["p99"] == pytest.approx(1e3 * expected)


@pytest.mark.parametrize("rates, expected", [([5.0], 5.0), ([4.0, 9.0], 4.0), ([7.0, 1.0, 3.0], 3.0)])
def test_the_round_in_the_middle(rates: list[float], expected: float) -> None:
    rounds: list[dict[str, Any]] = [{"error": "no time"}, *({"tokens_per_second": rate} for rate in rates)]
    found = median_of(rounds)
    assert found == {"tokens_per_second": expected, "tokens_per_second_of_rounds": sorted(rates)}


def test_texts_that_nobody_has_finished_are_not_compared() -> None:
    assert share_of_same({1: [5], 2: [6]}, {3: [5]}) is None
    assert share_of_same({1: [5], 2: [6], 3: [7]}, {1: [5], 2: [7]}) == 0.5


@pytest.mark.parametrize("ends, expected", [([2], 7), ([2, 9], 5), ([], 10)])
def test_padding_is_no_text(monkeypatch: pytest.MonkeyPatch, ends: list[int], expected: int) -> None:
    """Rows end with their first end token; the padding may be an end token too."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from common import count

    tokens = torch.tensor([[5, 2, 2, 2, 2], [5, 6, 9, 7, 8]])
    assert count(tokens, torch.tensor(ends, dtype=torch.long)) == expected
