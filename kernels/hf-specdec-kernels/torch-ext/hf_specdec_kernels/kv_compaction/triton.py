"""K/V compaction in Triton: one program for each cache, row and K/V head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher


BLOCK_SLOTS = 16
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Integer types in which values are moved, by size in bytes."""


@triton.jit(do_not_specialize=["path_stride_b", "block_tables_stride_b"])
def _kv_compaction_kernel(
    pointers, lengths, path, accepted, block_tables,
    stride_b, stride_h, stride_s, path_stride_b, block_tables_stride_b,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SLOTS: tl.constexpr, PAGE_SIZE: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """
    Program (cache, row, K/V head): moves BLOCK_SLOTS slots of the path at a time.

    All slots of a block are read before any is written; since a path ascends, later blocks read only slots above the
    written ones.
    """
    row = tl.program_id(1)
    cache = tl.load(pointers + tl.program_id(0)).to(tl.pointer_type(WORD))
    cache += tl.program_id(2).to(tl.int64) * stride_h
    length = tl.load(lengths + row).to(tl.int64)
    last = tl.load(accepted + row).to(tl.int32)
    dims = tl.arange(0, BLOCK_DIM)
    for first in range(1, last + 1, BLOCK_SLOTS):
        places = first + tl.arange(0, BLOCK_SLOTS)
        inside = places <= last
        nodes = tl.load(path + row * path_stride_b + places, mask=inside, other=0).to(tl.int64)
        moves = inside & (nodes != places)
        sources, targets = length + nodes, length + places
        if PAGE_SIZE == 0:
            source_offsets = row.to(tl.int64) * stride_b + sources * stride_s
            target_offsets = row.to(tl.int64) * stride_b + targets * stride_s
        else:
            table = block_tables + row * block_tables_stride_b
            source_blocks = tl.load(table + sources // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
            target_blocks = tl.load(table + targets // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
            source_offsets = source_blocks * stride_b + (sources % PAGE_SIZE) * stride_s
            target_offsets = target_blocks * stride_b + (targets % PAGE_SIZE) * stride_s
        mask = moves[:, None] & (dims < DIM)[None, :]
        states = tl.load(cache + source_offsets[:, None] + dims[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(cache + target_offsets[:, None] + dims[None, :], states, mask=mask)


def launch_kv_compaction(caches, lengths, path, accepted, block_tables, pointers) -> None:
    """See `hf_specdec_kernels.kv_compaction`."""
    cache = caches[0]
    if path.shape[1] < 2 or cache.numel() == 0:
        return
    path = path if path.stride(1) == 1 else path.contiguous()
    block_tables = block_tables if block_tables is None else block_tables.contiguous()
    size = cache.element_size()
    word = next(word for word in WORDS if all(_fits(cache, word) for cache in caches))
    strides = (stride * size // word for stride in cache.stride()[:3])
    dim = cache.shape[3] * size // word
    launcher(_kv_compaction_kernel, (len(caches), path.shape[0], cache.shape[1]))(
        pointers.contiguous(), lengths.contiguous(), path, accepted.contiguous(),
        path if block_tables is None else block_tables,
        *strides, path.stride(0), 0 if block_tables is None else block_tables.stride(0),
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_SLOTS=BLOCK_SLOTS,
        PAGE_SIZE=0 if block_tables is None else cache.shape[2], WORD=WORDS[word],
        num_warps=4,
    )  # fmt: skip


def _fits(cache: torch.Tensor, word: int) -> bool:
    """Whether address, strides and row size of a cache are multiples of `word` bytes."""
    size = cache.element_size()
    extents = (cache.data_ptr(), *(stride * size for stride in cache.stride()[:3]), cache.shape[3] * size)
    return all(extent % word == 0 for extent in extents)
