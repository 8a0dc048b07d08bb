"""K/V compaction in plain PyTorch, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def kv_compaction_naive(
    caches: Sequence[torch.Tensor],
    lengths: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    pointers: torch.Tensor | None = None,
) -> None:
    """See `hf_specdec_kernels.kv_compaction`; reads values on the host, and no `pointers`."""
    for row, (length, last) in enumerate(zip(lengths.tolist(), accepted.tolist(), strict=True)):
        for place in range(last + 1):
            source, target = length + int(path[row, place]), length + place
            for cache in caches:
                _slot(cache, row, target, block_tables).copy_(_slot(cache, row, source, block_tables))


def _slot(cache: torch.Tensor, row: int, slot: int, block_tables: torch.Tensor | None) -> torch.Tensor:
    """A view of one slot, `[kv_heads, dim]`."""
    if block_tables is None:
        return cache[row, :, slot]
    size = cache.shape[2]
    return cache[int(block_tables[row, slot // size]), :, slot % size]
