"""Overlaps of p and q in Triton against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from hf_specdec_kernels.overlaps import triton as in_triton
from hf_specdec_kernels.overlaps.naive import draft_overlaps_naive


GRID = (1.4, 1.0, 0.35)


def compare(logits: torch.Tensor, draft_logits: torch.Tensor, *values: torch.Tensor | None) -> torch.Tensor:
    grid = torch.tensor(GRID, device=logits.device)
    values = (*values, None, None, None)[:3]
    found = torch.full((len(logits), len(grid)), -7.0, device=logits.device)
    in_triton.launch_draft_overlaps(logits, draft_logits, grid, *values, found)
    expected = draft_overlaps_naive(logits, draft_logits, grid, *values)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, equal_nan=True)
    return found


@pytest.fixture(params=[64, 256], ids=["several blocks", "one block"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "LARGEST_BLOCK", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_naive(dtype: torch.dtype, device: torch.device) -> None:
    logits, noise = torch.randn(2, 2, 203, device=device).to(dtype)
    rows = torch.tensor([0.7, 1.3], device=device)
    found = compare(logits, logits + noise, rows, 1.0 / rows)
    assert found.min() > 0.1 and found.max() < 0.9


def test_a_draft_vocabulary_and_filtered_tokens(device: torch.device) -> None:
    logits, draft_logits = torch.randn(2, 203, device=device), torch.randn(2, 90, device=device)
    draft_logits[:, 5:40] = -torch.inf
    compare(logits, draft_logits, None, None, torch.randperm(203, device=device)[:90])


def test_temperatures_near_zero(device: torch.device) -> None:
    logits = 80 * torch.rand(2, 203, device=device)
    heat = torch.full((2,), 1e-6, device=device)
    assert (compare(logits, logits, heat, heat) == 1.0).all()


def test_rows_without_a_softmax(device: torch.device) -> None:
    logits, draft_logits = torch.randn(2, 4, 203, device=device)
    logits[0, 7], logits[1, 7], draft_logits[2, 100] = torch.nan, torch.inf, torch.nan
    found = compare(logits, draft_logits)
    assert found.isnan().all(dim=1).tolist() == [True, True, True, False]
