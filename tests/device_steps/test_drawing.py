"""What children are drawn from on the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.engine.captured import drawing
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


def test_no_more_than_the_best_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "MOST_KEPT", 8)
    logits = torch.randn(5, 3, 50, generator=torch.Generator().manual_seed(0))
    found = scores_of(logits, [(1.0, 0, 1.0), (1.0, 9, 1.0), (1.0, 8, 1.0), (1.0, 0, 0.99), (1.0, 9, 0.3)])
    counts = found.isfinite().sum(dim=-1)
    assert counts[:4].tolist() == [[50] * 3, [50] * 3, [8] * 3, [8] * 3]  # nothing to filter, too many, all that …
    assert (counts[4] >= 1).all() and (counts[4] <= 8).all()
    kept = found.isfinite()
    assert torch.equal(found[kept], logits[kept])
    assert all((row[keep].min() > row[~keep].max()).item() for row, keep in zip(logits[2], kept[2], strict=True))
