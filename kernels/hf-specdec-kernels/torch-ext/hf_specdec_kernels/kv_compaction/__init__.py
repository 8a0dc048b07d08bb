"""K/V compaction: moves the slots of a tree's accepted path directly after the committed slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ops import ops, register
from ..checks import INTEGERS, check, check_device, check_shape
from .naive import kv_compaction_naive


__all__ = ["kv_compaction", "kv_compaction_naive", "pointer_table"]


def pointer_table(caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """
    The addresses of caches, `[caches]` int64 on their device; valid as long as the caches stay at these addresses.

    The function copies from the host, so it cannot be called while a CUDA graph is captured.
    """
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device)


def kv_compaction(
    caches: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    lengths: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    *,
    block_tables: torch.Tensor | None = None,
) -> None:
    """
    Moves slots `lengths[b] + path[b, i]` to `lengths[b] + i` for `i <= accepted[b]`, in place.

    On CUDA one launch moves the keys and values of all layers, and nothing is read on the host. `lengths` stay as they
    are.

    Args:
        caches (`list` of `torch.Tensor`): the keys and values of all layers, all of one shape, `[batch, kv_heads,
            capacity, dim]`, and of equal strides, the last of which is 1; with `block_tables`, `[num_blocks, kv_heads,
            block_size, dim]`. Layers of another shape need a separate call.
        pointers (`torch.Tensor` of shape `[caches]`, int64): `pointer_table` of the caches.
        lengths (`torch.Tensor` of shape `[batch]`, int32 or int64): committed slots before the step.
        path (`torch.Tensor` of shape `[batch, depth + 1]`, int32 or int64): nodes of the accepted path, ascending; the
            first is the root, 0. Entries after `accepted` are ignored.
        accepted (`torch.Tensor` of shape `[batch]`, int32 or int64): accepted nodes without the root; -1 moves
            nothing.
        block_tables (`torch.Tensor` of shape `[batch, max_blocks]`, int32 or int64, *optional*): block table of a
            paged cache; entry i of a row is the block with its slots from `i * block_size` on.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    _check(caches, pointers, lengths, path, accepted, block_tables)
    ops.kv_compaction(list(caches), lengths, path, accepted, block_tables, pointers)


register(kv_compaction_naive, mutated=("caches",))


def _check(caches, pointers, lengths, path, accepted, block_tables) -> None:
    if not caches:
        raise ValueError("`caches` is empty; pass the keys and values of at least one layer.")
    first = caches[0]
    check_shape("caches[0]", first, None, None, None, None)
    for index, cache in enumerate(caches):
        if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError(
                f"`caches[{index}]` is a {cache.dtype} tensor of shape {list(cache.shape)} and strides "
                f"{cache.stride()}, the first one a {first.dtype} tensor of shape {list(first.shape)} and strides "
                f"{first.stride()}; call once for every layout."
            )
        check_device(f"caches[{index}]", cache, first.device)
    if first.stride(3) != 1:
        raise ValueError(f"`caches` have strides {first.stride()}; the last must be 1.")
    batch = path.shape[0] if block_tables is not None else first.shape[0]
    check("pointers", pointers, first.device, (torch.int64,), len(caches))
    check("path", path, first.device, INTEGERS, batch, None)
    check("lengths", lengths, first.device, INTEGERS, batch)
    check("accepted", accepted, first.device, INTEGERS, batch)
    check("block_tables", block_tables, first.device, INTEGERS, batch, None)
