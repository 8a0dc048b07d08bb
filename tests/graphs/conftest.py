"""A stand-in for CUDA's graphs."""

from __future__ import annotations

import pytest
from support.graphs import StandIn, install_stand_in

from hf_specdec.generation.static_batch import StaticBatch


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """With masks; where a test is `BY_ATTENTION`, with the kernel, too, of which the CPU has a plain version."""
    monkeypatch.setattr(StaticBatch, "obstacle", lambda call: "has tests of its own")
    return install_stand_in(monkeypatch, with_kernel=getattr(request, "param", False))
