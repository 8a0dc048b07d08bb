"""Counts of whole steps on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hf_specdec.engine.captured.step import InFlightStep

from .graphs import install_stand_in


BY_ATTENTION = pytest.mark.parametrize("steps", [True], ids=["kernel"], indirect=True)


@dataclass
class Steps:
    """How many decoding steps were captured, and how often they were launched."""

    captures: int = 0
    replays: int = 0


def install(monkeypatch: pytest.MonkeyPatch, with_kernel: bool, dispatches: bool = False) -> Steps:
    """Lets whole steps run on the CPU, and counts them; `dispatches` as in `install_stand_in`."""
    install_stand_in(monkeypatch, with_kernel, counts=False, dispatches=dispatches)
    return count(monkeypatch)


def count(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Counts whole steps."""
    found = Steps()
    capture, launch = InFlightStep.capture, InFlightStep.launch

    def counted_capture(self: InFlightStep, *args: Any) -> None:
        capture(self, *args)
        found.captures += 1

    def counted_launch(self: InFlightStep) -> None:
        found.replays += 1
        launch(self)

    monkeypatch.setattr(InFlightStep, "capture", counted_capture)
    monkeypatch.setattr(InFlightStep, "launch", counted_launch)
    return found
