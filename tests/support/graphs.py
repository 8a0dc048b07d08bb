"""A stand-in for CUDA graphs, with which their users run on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec import graphs, kernels


class StandIn:
    """Counts what was captured and replayed, and how often the kernel ran."""

    def __init__(self) -> None:
        self.captures = self.replays = self.attended = 0
        self.has_kernel = False

    def __call__(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> tuple[Callable, Any]:
        run()
        tensors = [tensor.clone() for tensor in run()]
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for tensor, new in zip(tensors, run(), strict=True):
                tensor.copy_(new)

        return replay, tensors


def install_stand_in(monkeypatch: pytest.MonkeyPatch, with_kernel: bool, counts: bool = True) -> StandIn:
    """
    Captures forwards on the CPU by a stand-in, `with_kernel` in its plain version or with masks. What `counts` how
    often the kernel runs is compiled anew each time.
    """
    found = StandIn()
    if with_kernel:
        pytest.importorskip("triton", reason="the kernels need triton")
        monkeypatch.setitem(kernels.DEVICES, "cpu", (torch.float64, torch.float32))
        attend, found.has_kernel = kernels.KernelInputs.attend, True

        def counted(*args: Any, **options: Any) -> torch.Tensor:
            found.attended += 1
            return attend(*args, **options)

        if counts:
            monkeypatch.setattr(kernels.KernelInputs, "attend", counted)
    monkeypatch.setitem(graphs.RECORDERS, "cpu", found)
    monkeypatch.setattr(graphs, "SMALLEST_CAPACITY", 32)
    return found
