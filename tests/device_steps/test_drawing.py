"""What children are drawn from on the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.engine.captured.drawing import Drawing


pytest.importorskip("triton", reason="the kernels need triton")

ROWS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.8), (1.3, 12, 0.6), (2.0, 3, 0.1), (1.0, 20, 0.99), (1.0, 0, 0.0)]
"""Temperature, top-k and top-p."""


def scores_of(logits: torch.Tensor, rows: list[tuple[float, int, float]]) -> torch.Tensor:
    temperature, top_k, top_p = map(list, zip(*rows, strict=True))
    own = Drawing(
        SimpleNamespace(),
        torch.ones(len(rows)),
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p),
    )
    return own.warp(logits)


def test_as_the_warpers_of_transformers() -> None:
    """Row by row, with filters of their own."""
    logits = 3.0 * torch.randn(len(ROWS), 4, 50, generator=torch.Generator().manual_seed(0))
    found = scores_of(logits, ROWS)
    for row, (temperature, top_k, top_p) in enumerate(ROWS):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
        torch.testing.assert_close(found[row], warpers(None, logits[row]))
