"""Lists of pairs in Triton against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from hf_specdec_kernels import pair_lists
from hf_specdec_kernels.pair_lists.triton import launch_pair_lists


def arguments(
    sizes: tuple[int, int, int], rank: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Candidates and vectors whose products are exact, in whatever order they are summed."""
    batch, levels, candidates = sizes
    vocab = 2 * candidates
    log_q = (2 * torch.randn(batch, levels, vocab)).log_softmax(dim=-1)
    tokens = log_q.topk(candidates, dim=-1, sorted=False).indices
    queries = torch.randint(-4, 5, (batch, levels, candidates, rank)) / 4
    keys = torch.randint(-4, 5, (vocab, rank)) / 4
    tensors = tokens, log_q.gather(2, tokens), queries.to(dtype), keys.to(dtype)
    return tuple(one.to(device) for one in tensors)


def by_kernel(*given: torch.Tensor, ranks: int, counts_others: bool) -> list[torch.Tensor]:
    shape = (*given[0].shape, ranks)
    results = [torch.full(shape, 77, dtype=dtype, device=given[0].device) for dtype in (torch.int64, torch.float32)]
    results.append(torch.full_like(results[0], 77))
    launch_pair_lists(*given, ranks, counts_others, *results)
    return [one.cpu() for one in results]


@pytest.mark.parametrize("counts_others", [True, False])
@pytest.mark.parametrize(
    "sizes, rank, ranks, dtype",
    [
        pytest.param((5, 10, 512), 16, 16, torch.bfloat16, marks=pytest.mark.gpu),  # the interpreter has no such dot
        ((2, 3, 37), 16, 4, torch.float32),
        ((1, 1, 1), 1, 1, torch.float32),
        ((1, 2, 20), 70, 20, torch.float32),
        ((3, 2, 9), 5, 3, torch.float16),
    ],
)
def test_against_naive(
    sizes: tuple[int, int, int], rank: int, ranks: int, dtype: torch.dtype, counts_others: bool, device: torch.device
) -> None:
    given = arguments(sizes, rank, device, dtype)
    named, scored, following = by_kernel(*given, ranks=ranks, counts_others=counts_others)
    expected = pair_lists(*(one.cpu() for one in given), ranks, counts_others)
    assert torch.equal(named, expected.tokens)
    assert torch.equal(following, expected.following)
    torch.testing.assert_close(scored, expected.log_q, atol=2e-6, rtol=1e-6)


def test_of_equals_the_first(device: torch.device) -> None:
    tokens, _, queries, keys = arguments((1, 2, 8), 3, device)
    named, _, following = by_kernel(
        tokens, torch.zeros(1, 2, 8, device=device), 0 * queries, keys, ranks=3, counts_others=False
    )
    assert (following == torch.arange(3)).all()
    assert torch.equal(named, tokens.cpu()[:, :, None, :3].expand_as(named))


def test_nan_comes_last(device: torch.device) -> None:
    """And leaves no log-probability of its position, but lists that can be followed."""
    given = arguments((1, 2, 6), 4, device)
    given[1][0, 1, 2] = torch.nan
    for counts_others in (True, False):
        found = by_kernel(*given, ranks=6, counts_others=counts_others)
        expected = pair_lists(*(one.cpu() for one in given), 6, counts_others)
        assert (found[2][0, 1, :, -1] == 2).all()
        assert torch.equal(found[2], expected.following)
        assert found[1][0, 1].isnan().all() and expected.log_q[0, 1].isnan().all()
        assert found[1][0, 0].isfinite().all()


def test_no_rows(device: torch.device) -> None:
    given = [one[:0] for one in arguments((1, 2, 6), 4, device)[:3]]
    keys = torch.zeros(12, 4, device=device)
    assert by_kernel(*given, keys, ranks=2, counts_others=True)[0].shape == (0, 2, 6, 2)
