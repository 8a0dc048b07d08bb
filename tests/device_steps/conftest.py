"""Whole steps run here on the CPU, by a stand-in for CUDA graphs."""

from __future__ import annotations

import pytest
from support.device_steps import Steps, install


@pytest.fixture
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """With the attention kernel in its plain version."""
    pytest.importorskip("triton", reason="the kernels need triton")
    return install(monkeypatch, with_kernel=getattr(request, "param", True))
