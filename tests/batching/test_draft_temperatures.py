"""A temperature of q for requests that share it, in steps with several trees."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.engine import temperatures as of_engine
from hf_specdec.engine.temperatures import DraftTemperatures
from hf_specdec.verification import DraftTemperature


def distributions(num_groups: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """p and log q of some rows per group: q at temperature 0.25 is p."""
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(2, 50, generator=generator) * 3 for _ in range(num_groups)]
    return [((own / 0.25).softmax(-1), own) for own in scores]


@pytest.mark.parametrize("num_groups", [1, 3])
def test_groups_of_a_step_teach_as_one(num_groups: int) -> None:
    """Steps are counted once, and what was drawn is scaled back by the value it was drawn at."""
    shared, alone = DraftTemperatures(), DraftTemperature()
    for _ in range(20):
        temperature = shared.of((), None)
        shown = [(p, temperature.apply(q)) for p, q in distributions(num_groups)]
        for p, scores in shown:
            observe = shared.observer(temperature)
            if observe is not None:
                observe(p, scores)
        shared.end_step()
        if alone.begin_step():
            alone.observe(*(torch.cat(parts) for parts in zip(*shown, strict=True)))
        assert temperature.value == alone.value and temperature._overlaps == alone._overlaps
    assert alone.value == 0.25


def test_requests_that_share_a_draft_temperature() -> None:
    temperatures = DraftTemperatures()
    first = temperatures.of((1,), None)
    assert first is temperatures.of((1,), None)
    assert first is not temperatures.of((2,), None) and first is not temperatures.of((1,), 0.5)
    assert temperatures.of((1,), 0.5).value == 0.5 and not temperatures.of((1,), 0.5).adapts
    assert temperatures.of(7, None) is not temperatures.of(7, None)


def test_the_number_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_engine, "MOST", 3)
    temperatures = DraftTemperatures()
    first = temperatures.of((0,), None)
    for number in range(1, 10):
        temperatures.of((number,), None)
        assert temperatures.of((0,), None) is first  # used all along
    assert len(temperatures._kept) == 3
