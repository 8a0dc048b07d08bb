"""
`tree="auto"` on recorded texts with synthetic step times: calls with nothing asked reach plain decoding and the best
fixed tree. The bars are those of `benchmarks/auto_speed.py`, for a few turns.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

import pytest
from support.replayed import Bars, Process, bars_of, texts_of
from support.simulated import Machine

from hf_specdec.trees.auto_choice import AutoChoice
from hf_specdec.trees.auto_learning import Losses, Remembered


MACHINES = {
    "flat": Machine(((0, 40.0), (63, 44.0)), level=2.0),
    # The first nodes cost most of what nine do: a step with 3 takes 1.6 plain ones, one with 9 takes 1.7.
    "jump": Machine(((0, 40.0), (1, 52.0), (3, 58.0), (9, 59.0), (16, 62.0), (63, 120.0)), level=2.0),
    "native bfloat16": Machine(
        ((0, 40.0), (1, 50.0), (3, 57.0), (4, 60.0), (9, 64.0), (16, 72.0), (32, 100.0), (63, 160.0)), level=2.5
    ),
    "bfloat16 without its matmul": Machine(((0, 42.0), (9, 191.0), (15, 282.0)), level=5.0),
    "float32": Machine(((0, 58.0), (9, 112.0), (15, 112.0), (63, 160.0)), level=4.0),
}
FAST = {("jump", 0.02, 0), ("native bfloat16", 0.02, 0)}


def bars(name: str, noise: float = 0.02, temperature: int = 0, **options: Any) -> Bars:
    process = Process(replace(MACHINES[name], noise=noise), draws=temperature > 0, **options)
    return bars_of(process, texts_of(temperature), turns=3)


@pytest.mark.parametrize(
    "name, noise, temperature",
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(MACHINES, (0.02, 0.5), (0, 1))
    ],
)
@pytest.mark.some_cases(1)
def test_no_slower_than_plain_and_as_fast_as_the_best_tree(name: str, noise: float, temperature: int) -> None:
    found = bars(name, noise, temperature)
    assert found.first >= 0.90
    assert min(found.plain.values()) >= 0.93 and statistics.median(found.plain.values()) >= 0.97
    if found.best:
        assert statistics.fmean(found.best.values()) >= 0.93


class Plain(AutoChoice):
    """Never drafts."""

    def begin_step(self, length: int, evidence: Any = None) -> None:
        self.tree = None


def test_without_trees_the_best_ones_are_missed() -> None:
    found = bars("native bfloat16", new_choice=Plain)
    assert min(found.plain.values()) == pytest.approx(1.0)
    assert statistics.fmean(found.best.values()) < 0.85


@pytest.mark.slow
def test_losses_that_are_likely_made_up_for_do_not_end_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as little patience on every machine the first rejections of a text would."""
    now = bars("native bfloat16")
    monkeypatch.setattr(Losses, "HOPE", 0.0)
    monkeypatch.setattr(Remembered, "WEIGHT", 4.0)
    before = bars("native bfloat16")
    assert statistics.fmean(now.best.values()) > statistics.fmean(before.best.values()) + 0.02


def test_what_may_be_lost_depends_on_what_is_to_gain() -> None:
    losses = Losses(asked=96, lost=4.0, written=20.0)
    assert not losses.allow(0.02) and not losses.allow(0.02, speed=1.02)
    assert losses.allow(0.02, speed=1.1)
    losses.written = 94.0  # too few tokens are left to make up for it
    assert not losses.allow(0.02, speed=1.5)
    assert not losses.allow(0.02, speed=0.0)
