"""Draft tokens in Triton against plain PyTorch: equal tokens in equal order, and close log-probabilities."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from selection import fast

from hf_specdec_kernels.draft_tokens import triton as in_triton
from hf_specdec_kernels.draft_tokens.naive import draft_tokens_naive, draw_children_naive
from hf_specdec_kernels.draft_tokens.noise import exponential_noise_naive, philox


@triton.jit
def _write_philox(bits, seeds, query, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    zero = at * 0
    a, b, c, d = tl.philox(tl.load(seeds + row), at, zero + query, zero, zero)
    bits += row * 4 * BLOCK + 4 * at
    tl.store(bits, a.to(tl.int64))
    tl.store(bits + 1, b.to(tl.int64))
    tl.store(bits + 2, c.to(tl.int64))
    tl.store(bits + 3, d.to(tl.int64))


def compare(
    logits: torch.Tensor, count: int, temperature: torch.Tensor | None, drawn: bool, *noise: torch.Tensor | None
) -> None:
    shape = (*logits.shape[:2], count)
    tokens = torch.full(shape, -7, device=logits.device)
    log_probabilities, best = (torch.full(shape, torch.nan, device=logits.device) for _ in range(2))
    if drawn:
        seeds = torch.randint(2**63 - 1, (len(logits),)).to(logits.device)
        given = logits, count, seeds, 3, temperature, *(noise or (None, None))
        in_triton.launch_draw_children(*given, tokens, log_probabilities, best)
        expected = draw_children_naive(*given)
        torch.testing.assert_close(best, expected[2], atol=1e-5, rtol=1e-5)
        assert torch.equal(tokens, expected[0])
        in_triton.launch_draw_children(*given, tokens, log_probabilities, None)
    else:
        in_triton.launch_draft_tokens(logits, count, temperature, tokens, log_probabilities)
        expected = draft_tokens_naive(logits, count, temperature)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(log_probabilities, expected[1], atol=1e-5, rtol=1e-5)


def arguments(
    shape: tuple[int, int, int], dtype: torch.dtype, tempered: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random logits `shape`, and a temperature `[batch]` if `tempered`."""
    logits = (2 * torch.randn(shape)).to(dtype)
    return logits.to(device), (0.3 + torch.rand(shape[0])).to(device) if tempered else None


@pytest.fixture(params=[64, 256], ids=["several parts", "one part"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(in_triton, "LARGEST_BLOCK", request.param)
    return request.param


SIZES = [((2, 2, 150), 7), ((1, 1, 5), 5), ((3, 2, 64), 1)]
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
    logits, temperature = arguments(shape, dtype, tempered, device)
    compare(logits, count, temperature, drawn)


@pytest.mark.parametrize("of_rows", fast([False, True], [True]), ids=["of nodes", "of rows"])
@pytest.mark.parametrize("named", fast([False, True], [True]), ids=["whole vocabulary", "a part of it"])
def test_positions(of_rows: bool, named: bool, block: int, device: torch.device) -> None:
    """One number for all queries of a row, or one for each; and columns that are not their tokens' numbers."""
    logits, temperature = arguments((2, 3, 150), torch.float32, True, device)
    positions = torch.tensor([[70_000], [5]]) if of_rows else torch.tensor([[4, 5, 5], [9, 4, 2**31 + 3]])
    token_ids = torch.randperm(100_000)[:150].to(device) if named else None
    compare(logits, 7, temperature, True, positions.to(device), token_ids)


def test_written_noise(block: int, device: torch.device) -> None:
    seeds, numbers = torch.tensor([3, 2**62 + 1], device=device), torch.tensor([[4, 9, 4]], device=device)
    noise = torch.full((2, 3, 1_500), torch.nan, device=device)
    in_triton.launch_exponential_noise(seeds, numbers.expand(2, -1), 1_500, noise)
    torch.testing.assert_close(noise, exponential_noise_naive(seeds, numbers, 1_500), atol=0, rtol=1e-6)
    assert torch.equal(noise[:, 0], noise[:, 2]) and not torch.equal(noise[:, 0], noise[:, 1])


@pytest.mark.parametrize("drawn", [False, True])
def test_small_support_ends_with_nothing(drawn: bool, block: int, device: torch.device) -> None:
    logits, _ = arguments((2, 2, 130), torch.float32, False, device)
    logits[:, :, 3:] = -torch.inf
    logits[:, 1] = logits[:, 1].flip(-1)
    compare(logits, 5, None, drawn)
    assert draft_tokens_naive(logits, 5)[0][..., 3:].unique().tolist() == [-1]


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_without_a_softmax_have_no_tokens(drawn: bool, block: int, device: torch.device) -> None:
    """NaN, +inf or nothing but -inf at one node leaves the others as they are."""
    logits, temperature = arguments((4, 2, 130), torch.float32, True, device)
    logits[0, 0, 100], logits[1, 1, 3], logits[2, 0], logits[3, 0, 9] = torch.nan, torch.inf, -torch.inf, -torch.inf
    compare(logits, 3, temperature, drawn)
    has_none = (draft_tokens_naive(logits, 3, temperature)[0] < 0).all(dim=-1)
    assert has_none.tolist() == [[True, False], [False, True], [True, False], [False, False]]


@pytest.mark.parametrize("drawn", [False, True])
def test_equals(drawn: bool, block: int, device: torch.device) -> None:
    """The lowest of equal tokens is the best."""
    compare(torch.randint(0, 3, (2, 1, 130)).float().to(device), 9, None, drawn)


@pytest.mark.parametrize("drawn", [False, True])
def test_strides(drawn: bool, device: torch.device) -> None:
    logits, _ = arguments((2, 6, 90), torch.float32, False, device)
    compare(logits[:, ::2], 4, None, drawn)


def test_temperatures_near_zero_leave_the_noise(block: int, device: torch.device) -> None:
    """Beside scores of 1e8 float32 would round it away: of equal tokens in both parts all are drawn."""
    logits = torch.full((40, 1, 130), 13.0, device=device)
    logits[..., [3, 90, 128]] = 78.7
    temperature = torch.full((40,), 1e-6, device=device)
    compare(logits[:4], 3, temperature[:4], True)
    seeds = torch.arange(40, device=device)
    assert draw_children_naive(logits, 1, seeds, 0, temperature)[0].unique().tolist() == [3, 90, 128]


def test_noise_is_that_of_triton(device: torch.device) -> None:
    """Philox by `triton.language`, in the order that its programs read."""

    seeds = torch.tensor([0, 1, 2**62 + 12345, 2**63 - 1], device=device)
    bits = torch.zeros(4, 64, 4, dtype=torch.int64, device=device)
    _write_philox[(4,)](bits, seeds, 5, BLOCK=64)
    groups = torch.arange(64, device=device)
    expected = philox(seeds[:, None], groups, torch.full_like(groups, 5), 0 * groups, 0 * groups)
    assert torch.equal(bits, expected)


def test_philox_is_the_published_one() -> None:
    """Known answers of the Random123 library for philox4x32-10."""
    ones = torch.tensor(0xFFFFFFFF)
    zero = torch.tensor(0)
    assert [f"{word:08x}" for word in philox(zero, zero, zero, zero, zero).tolist()] == [
        *("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8")
    ]
    assert [f"{word:08x}" for word in philox(torch.tensor(-1), ones, ones, ones, ones).tolist()] == [
        *("408f276d", "41c83b0e", "a20bc7c6", "6d5451fd")
    ]


def test_other_queries_draw_other_noise() -> None:
    seeds = torch.tensor([7, 8])
    whole = exponential_noise_naive(seeds, torch.arange(5)[None], 103)
    assert torch.equal(whole[:, 2:4], exponential_noise_naive(seeds, torch.tensor([[2, 3]]), 103))
    assert len(whole.flatten().unique()) == whole.numel()


def test_noise_is_exponential() -> None:
    """Kolmogorov and Smirnov's distance at 1e-5, of all numbers and of the thousandth part that is small."""
    noise = (
        exponential_noise_naive(torch.tensor([3, 4]), torch.arange(4)[None], 250_000).flatten().double().sort().values
    )
    assert 0 < noise[0] and noise[-1] < torch.inf
    cumulative, places = -torch.expm1(-noise), torch.arange(len(noise), dtype=torch.float64) + 0.5
    assert (cumulative - places / len(noise)).abs().max() * len(noise) ** 0.5 < 2.5
    small = cumulative[cumulative < 1e-3] / 1e-3
    assert (small - places[: len(small)] / len(small)).abs().max() * len(small) ** 0.5 < 2.5


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_large_vocabularies(vocab: int, drawn: bool, device: torch.device) -> None:
    logits, temperature = arguments((4, 10, vocab), torch.float32, drawn, device)
    compare(logits, 10, temperature, drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
def test_offsets_beyond_32_bits(drawn: bool, device: torch.device) -> None:
    """Offsets past 2³¹ elements, from a query stride of 2³⁰."""
    vocab, stride = 100, 2**30
    memory = torch.zeros(2 * stride + vocab, dtype=torch.bfloat16, device=device)
    logits = memory.as_strided((1, 3, vocab), (0, stride, 1))
    logits.copy_(torch.randn(1, 3, vocab))
    compare(logits, 4, None, drawn)
