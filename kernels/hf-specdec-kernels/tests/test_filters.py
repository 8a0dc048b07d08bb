"""Top-k and top-p in Triton: exactly the tokens that plain PyTorch and transformers' warpers keep."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from selection import fast
from transformers import TopKLogitsWarper, TopPLogitsWarper

from hf_specdec_kernels.rejection_sampling import triton as launches
from hf_specdec_kernels.rejection_sampling.filters import filter_logits_naive, target_probabilities
from hf_specdec_kernels.rejection_sampling.triton import SHIFTS, launch_filter_logits
from hf_specdec_kernels.rejection_sampling.triton_filters import filters
from hf_specdec_kernels.rejection_sampling.triton_passes import kept_weights, softmax_sums


@triton.jit
def _filter_kernel(
    logits, bins, weights, totals, vocab, temperature, top_k, top_p,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (row): writes the weights of the tokens that the filters keep, and their sum as `filters` returns it."""
    row = tl.program_id(0)
    logits += row * vocab
    heat = tl.load(temperature + row)
    highest, total = softmax_sums(logits, logits, vocab, heat, False, BLOCK, 1)
    threshold, first_tied, total = filters(
        logits, bins + row * BINS, vocab, highest, total, heat, tl.load(top_k + row), tl.load(top_p + row),
        SHIFT, BLOCK, BINS, 1,
    )  # fmt: skip
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        weight = kept_weights(found, at, vocab, highest, heat, threshold, first_tied, True, SHIFT)
        tl.store(weights + row * vocab + at, weight, mask=at < vocab)
    tl.store(totals + row, total)


def filtered(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, bins: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the tokens that the filters keep, `[rows, vocab]`, and their sums `[rows]`."""
    rows, vocab = logits.shape
    weights = torch.full((rows, vocab), torch.nan, device=logits.device)
    totals = torch.full((rows,), torch.nan, device=logits.device)
    room = torch.full((rows, bins), -7, device=logits.device)
    _filter_kernel[(rows,)](
        logits, room, weights, totals, vocab, temperature, top_k, top_p,
        SHIFT=SHIFTS[logits.dtype], BLOCK=64, BINS=bins,
    )  # fmt: skip
    return weights, totals


SCORES = {
    "usual": lambda *shape: 2.0 * torch.randn(shape),
    "ties": lambda *shape: torch.randn(shape).mul(2).round() / 2,
    "all equal": lambda *shape: torch.full(shape, 1.5),
    "far below zero": lambda *shape: torch.randn(shape) - 90.0,
    "around zero": lambda *shape: 1e-3 * torch.randn(shape),
    "one that towers": lambda *shape: torch.randn(shape).index_fill(1, torch.tensor([shape[1] // 2]), 60.0),
    "few possible": lambda *shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.9, -torch.inf),
    "steep": lambda *shape: 30.0 * torch.randn(shape),
}


def settings(vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperature, top-k and top-p, each `[8]`, one value per row."""
    top_k = torch.tensor([0, 1, 5, vocab // 2 + 1, 0, 7, 64, vocab + 3], dtype=torch.int32)
    top_p = torch.tensor([0.9, 1.0, 0.53, 1.0, 0.9991, 0.951, 0.31, 1e-6])
    return torch.linspace(0.4, 1.6, 8).to(device), top_k.to(device), top_p.to(device)


CASES = [(name, dtype, 150) for name in SCORES for dtype in (torch.float32, torch.float16, torch.bfloat16)]
CASES += [("ties", torch.bfloat16, vocab) for vocab in (1, 2, 63, 64, 65)]


FAST = [("usual", torch.float32, 150), ("few possible", torch.float16, 150)]
FAST += [("ties", torch.bfloat16, vocab) for vocab in (65, 150)]


@pytest.mark.parametrize("name, dtype, vocab", fast(CASES, FAST))
def test_the_tokens_that_are_left(name: str, dtype: torch.dtype, vocab: int, device: torch.device) -> None:
    logits = SCORES[name](8, vocab)
    logits[:, 0] = logits[:, 0].clamp(min=0.5)  # one token at least is possible
    logits = logits.to(device, dtype)
    temperature, top_k, top_p = settings(vocab, device)
    weights, totals = filtered(logits, temperature, top_k, top_p)
    expected = target_probabilities(logits, temperature, top_k, top_p)
    found = weights.double() / weights.double().sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(found > 1e-30, expected > 1e-30)
    torch.testing.assert_close(totals, weights.sum(dim=-1), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bins", [2, 64, 4096])
def test_other_numbers_of_bins(bins: int, device: torch.device) -> None:
    logits = (3.0 * torch.randn(8, 200)).to(device)
    temperature, top_k, top_p = settings(200, device)
    weights, _ = filtered(logits, temperature, top_k, top_p, bins)
    assert torch.equal(weights > 0, target_probabilities(logits, temperature, top_k, top_p) > 0)


@pytest.mark.parametrize(
    "top_k, top_p", fast([(1, 1.0), (10, 1.0), (500, 0.8), (1000, 0.9), (40, 0.7), (1000, 0.01)], [(40, 0.7)])
)
def test_transformers_leaves_the_same(top_k: int, top_p: float, device: torch.device) -> None:
    """Triton and transformers keep equal tokens if all scores differ."""
    logits = (2.0 * torch.randn(1, 1000)).to(device)
    expected = TopKLogitsWarper(top_k)(None, logits)
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    ones = torch.ones(1, device=device)
    weights, _ = filtered(logits, ones, (top_k * ones).int(), top_p * ones)
    assert torch.equal(weights > 0, expected > -torch.inf)


def logits_left(logits: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(logits, 7.0)
    launch_filter_logits(logits, *values, found)
    return found


@pytest.mark.parametrize("dtype", fast([torch.float32, torch.float16, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize("name", fast(SCORES, ["ties"]))
def test_the_logits_that_are_left(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two blocks, strided as the last of three queries."""
    monkeypatch.setattr(launches, "LARGEST_BLOCK", 64)
    logits = SCORES[name](24, 70).view(8, 3, 70)[:, 2:].to(device, dtype)
    values = settings(70, device)
    assert torch.equal(logits_left(logits, *values), filter_logits_naive(logits, *values))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays(bad: float, device: torch.device) -> None:
    """NaN and +inf must show where children are drawn; a row of -inf stays as it is."""
    logits = torch.randn(8, 1, 40, device=device)
    logits[:, :, slice(None) if bad == -torch.inf else 7] = bad
    for filtered in (logits_left, filter_logits_naive):
        found = filtered(logits, *settings(40, device))
        assert torch.equal(found[:, :, 7].nan_to_num(9.0), logits[:, :, 7].nan_to_num(9.0))


@pytest.mark.parametrize("wrong", ["one key more", "ties not cut"])
def test_a_wrong_threshold_is_found(wrong: str, device: torch.device) -> None:
    """A set of kept tokens that is wrong at the threshold differs from the expected one: the tests above find it."""
    logits = (torch.randn(8, 300).mul(2).round() / 2).to(device)
    temperature, top_k, top_p = settings(300, device)
    expected = target_probabilities(logits, temperature, top_k, top_p) > 0
    lowest = torch.where(expected, logits, torch.inf).amin(dim=-1, keepdim=True)
    changed = logits > lowest if wrong == "one key more" else logits >= lowest
    assert (changed != expected).any()


def test_impossible_everywhere_ends(device: torch.device) -> None:
    """A row without any possible token has no distribution, but the search does not run forever."""
    logits = torch.full((8, 70), -torch.inf, device=device)
    _, totals = filtered(logits, *settings(70, device))
    assert totals.shape == (8,)
