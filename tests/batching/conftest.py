"""What tests of whole steps of requests share."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.batching.device_steps.step import InFlightStep


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[InFlightStep]:
    """The whole steps that have run, one after the other."""
    found: list[InFlightStep] = []
    launch = InFlightStep.launch

    def counted(self: InFlightStep) -> Any:
        found.append(self)
        return launch(self)

    monkeypatch.setattr(InFlightStep, "launch", counted)
    return found
