"""Counts of whole steps on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hf_specdec.device_steps import captures

from .graphs import install_stand_in


BY_ATTENTION = pytest.mark.parametrize("steps", [False, True], ids=["masks", "kernel"], indirect=True)
"""For tests of what attention takes part in: captured steps attend by masks or by the kernel."""


@dataclass
class Steps:
    """How many steps were captured, and how often they were replayed."""

    captures: int = 0
    replays: int = 0


def install(monkeypatch: pytest.MonkeyPatch, with_kernel: bool) -> Steps:
    """Lets whole steps run on the CPU, and counts them."""
    install_stand_in(monkeypatch, with_kernel, counts=False)
    found = Steps()

    class Counted(captures.DeviceStep):
        def capture(self, target: Any, *rest: Any) -> None:
            super().capture(target, *rest)
            found.captures += 1
            replay: Callable[[], None] = self.replay

            def counted() -> None:
                found.replays += 1
                replay()

            self.replay = counted
            self.captured_for = target

        def load(self, target: Any, *rest: Any) -> None:
            """A graph keeps what hooks gave at its capture; the stand-in, which runs them, asks the live ones."""
            super().load(target, *rest)
            if target.features is not None and hasattr(self, "captured_for"):
                self.captured_for.features = target.features
                target.features._listens = lambda: True

    monkeypatch.setattr(captures, "DeviceStep", Counted)
    return found
