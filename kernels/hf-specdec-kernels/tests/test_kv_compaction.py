"""K/V compaction in Triton against a loop over slots; every slot of every cache is compared."""

from __future__ import annotations

import pytest
import torch

from hf_specdec_kernels import kv_compaction, pointer_table
from hf_specdec_kernels.kv_compaction.naive import kv_compaction_naive
from hf_specdec_kernels.kv_compaction.triton import launch_kv_compaction


def paths(batch: int, nodes: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending paths of random lengths: one row inactive, one of full length; entries after the ends are invalid."""
    accepted = torch.randint(0, depth + 1, (batch,))
    accepted[0], accepted[-1] = -1, depth
    path = torch.stack([(torch.randperm(nodes)[:depth] + 1).sort().values for _ in range(batch)])
    path = torch.nn.functional.pad(path, (1, 0))
    return path.masked_fill(torch.arange(depth + 1) > accepted[:, None], 10**6), accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("nodes, depth, dim", [(1, 1, 8), (9, 4, 24), (40, 37, 16), (60, 60, 5)])
def test_against_naive(
    nodes: int, depth: int, dim: int, page_size: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    batch, kv_heads, capacity, layers = 3, 2, 80, 2
    lengths = torch.tensor([0, 7, capacity - nodes - 1], dtype=torch.int32, device=device)
    path, accepted = (tensor.to(device) for tensor in paths(batch, nodes, depth))
    shape, block_tables = (batch, kv_heads, capacity, dim), None
    if page_size is not None:
        shape = (batch * capacity // page_size, kv_heads, page_size, dim)
        block_tables = torch.randperm(shape[0], device=device).view(batch, -1).int()
    caches = [torch.randn(shape, device=device).to(dtype) for _ in range(2 * layers)]
    before, expected = caches[0].clone(), [cache.clone() for cache in caches]
    kv_compaction_naive(expected, lengths, path, accepted, block_tables)
    launch_kv_compaction(caches, lengths, path, accepted, block_tables, pointer_table(caches))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)
    if depth > 1 and depth < nodes:
        assert not torch.equal(expected[0], before)


def test_slots_before_heads_and_one_stacked_buffer(device: torch.device) -> None:
    stacked = torch.randn(4, 3, 50, 2, 8, device=device)  # K and V of two layers, [batch, slots, heads, dim]
    caches = [buffer.transpose(1, 2) for buffer in stacked]
    before = [cache.clone() for cache in caches]
    path, accepted = (tensor.to(device) for tensor in paths(3, 12, 5))
    lengths = torch.tensor([3, 11, 30], device=device)
    expected = [cache.clone() for cache in before]
    kv_compaction_naive(expected, lengths, path, accepted)
    launch_kv_compaction(caches, lengths, path, accepted, None, pointer_table(caches))
    for cache, wanted, old in zip(caches, expected, before, strict=True):
        assert torch.equal(cache, wanted)
        assert not torch.equal(wanted, old)


def test_the_naive_version_moves_what_a_gather_would() -> None:
    cache = torch.randn(2, 3, 20, 4)
    path, accepted = torch.tensor([[0, 2, 5], [0, 1, 4]]), torch.tensor([2, 2])
    lengths = torch.tensor([3, 6])
    wanted = cache.clone()
    for row in range(2):
        start = lengths[row]
        wanted[row, :, start : start + 3] = cache[row, :, start + path[row]]
    kv_compaction(moved := [cache], pointer_table(moved), lengths, path, accepted)
    assert torch.equal(cache, wanted)
