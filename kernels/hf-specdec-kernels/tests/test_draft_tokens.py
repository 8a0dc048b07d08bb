"""Draft tokens in Triton against plain PyTorch: equal tokens in equal order, and close log-probabilities."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from selection import fast

from hf_specdec_kernels.draft_tokens import triton as in_triton
from hf_specdec_kernels.draft_tokens.naive import draft_tokens_naive


def compare(logits: torch.Tensor, count: int, temperature: torch.Tensor | None, noise: torch.Tensor | None) -> None:
    tokens = torch.full((*logits.shape[:2], count), -7, device=logits.device)
    log_probabilities = torch.full_like(tokens, torch.nan, dtype=torch.float32)
    in_triton.launch_draft_tokens(logits, count, temperature, noise, tokens, log_probabilities)
    expected_tokens, expected = draft_tokens_naive(logits, count, temperature, noise)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probabilities, expected, atol=1e-5, rtol=1e-5)


def arguments(
    shape: tuple[int, int, int], dtype: torch.dtype, drawn: bool, tempered: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Random logits `shape`, temperature `[batch]` if `tempered`, and noise `shape` if `drawn`."""
    logits = (2 * torch.randn(shape)).to(dtype)
    temperature = (0.3 + torch.rand(shape[0])).to(device) if tempered else None
    noise = torch.empty(shape).exponential_().to(device) if drawn else None
    return logits.to(device), temperature, noise


@pytest.fixture(params=[64, 256], ids=["several parts", "one part"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(in_triton, "LARGEST_BLOCK", request.param)
    return request.param


SIZES = [((2, 3, 203), 7), ((1, 1, 5), 5), ((3, 2, 64), 1)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FAST = [(*SIZES[0], True, True, torch.float32), (*SIZES[0], False, False, torch.bfloat16)]
FAST += [(*SIZES[1], False, True, torch.float16), (*SIZES[2], True, False, torch.float32)]


@pytest.mark.parametrize(
    "shape, count, tempered, drawn, dtype",
    fast([(*size, *rest) for size in SIZES for rest in product((False, True), (False, True), DTYPES)], FAST),
)
def test_against_naive(
    shape: tuple, count: int, tempered: bool, drawn: bool, dtype: torch.dtype, block: int, device: torch.device
) -> None:
    logits, temperature, noise = arguments(shape, dtype, drawn, tempered, device)
    compare(logits, count, temperature, noise)


@pytest.mark.parametrize("drawn", [False, True])
def test_small_support_ends_with_nothing(drawn: bool, block: int, device: torch.device) -> None:
    logits, _, noise = arguments((2, 2, 203), torch.float32, drawn, False, device)
    logits[:, :, 3:] = -torch.inf
    logits[:, 1] = logits[:, 1].flip(-1)
    compare(logits, 5, None, noise)
    assert draft_tokens_naive(logits, 5, None, noise)[0][..., 3:].unique().tolist() == [-1]


def test_of_equals_the_lowest(block: int, device: torch.device) -> None:
    compare(torch.randint(0, 3, (2, 2, 203)).float().to(device), 9, None, None)


def test_strides(device: torch.device) -> None:
    logits, _, noise = arguments((2, 6, 90), torch.float32, True, False, device)
    compare(logits[:, ::2], 4, None, noise.transpose(0, 1).contiguous().transpose(0, 1)[:, ::2])


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_large_vocabularies(vocab: int, drawn: bool, device: torch.device) -> None:
    logits, temperature, noise = arguments((4, 10, vocab), torch.float32, drawn, drawn, device)
    compare(logits, 10, temperature, noise)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """Offsets past 2³¹ elements, from a query stride of 2³⁰."""
    vocab, stride = 100, 2**30
    memory = torch.zeros(2 * stride + vocab, dtype=torch.bfloat16, device=device)
    logits = memory.as_strided((1, 3, vocab), (0, stride, 1))
    logits.copy_(torch.randn(1, 3, vocab))
    compare(logits, 4, None, None)
