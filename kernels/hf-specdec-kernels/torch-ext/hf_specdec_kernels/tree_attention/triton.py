"""Tree attention in Triton: keys and values split over programs, query heads and nodes packed into one tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, num_multiprocessors, options_of_launch, shared_memory_limit
from .tiles import Tiles, plan_launch


LOG2_E = tl.constexpr(1.4426950408889634)
BLOCKS_OF_WAITING = tl.constexpr(2)
"""Blocks of committed slots that are read while the second loop of a program waits for its first keys."""
_COMBINED, _COMBINED_OF_MANY, _MANY_SPLITS = 4096, 8192, 9
"""Partial values that a program of `_combine_kernel` joins, with fewer than 9 splits, and with 9 or more."""


@triton.jit
def _attend(
    query, keys, values, allowed, accumulated, highest, total,
    scale, softcap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    One step of the online softmax (arXiv 2205.14135), in powers of two. The maximum is taken over raw scores and then
    multiplied by `scale`, which is positive, so that scaling and subtracting are one instruction per score.
    """
    scores = tl.dot(query, keys, input_precision=PRECISION)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1); `scale` makes x = score / softcap.
        scores = 1.0 - 2.0 / (tl.exp(2.0 * (scores * scale)) + 1.0)
        scale = softcap * LOG2_E
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
    weights = tl.exp2(scores * scale - shift[:, None])
    rescale = tl.exp2(highest - shift)
    total = total * rescale + tl.sum(weights, axis=1)
    accumulated = accumulated * rescale[:, None]
    accumulated = tl.dot(weights.to(values.dtype), values, accumulated, input_precision=PRECISION)
    return accumulated, new_highest, total


@triton.jit
def _slot_offsets(slots, inside, table, stride_block, stride_slot, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a row's slots, in elements from the beginning of the row (of the cache, with pages)."""
    if PAGE_SIZE == 0:
        offsets = (slots.to(tl.int64) if WIDE else slots) * stride_slot
    else:
        blocks = tl.load(table + slots // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        offsets = blocks * stride_block + (slots % PAGE_SIZE) * stride_slot
    return offsets


_SIZES = ["window", "queries", "num_nodes", "capacity", "num_splits", "num_tiles"]
_STRIDES = ["ancestors_stride_b", "ancestors_stride_n", "query_depths_stride_b", "node_depths_stride_b"]


# Compiling takes one or two seconds, and these change with the numbers of nodes and of blocks: without exceptions for
# multiples of 16 and for 1, sizes that fall on the same tiles share their code.
@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES, "block_tables_stride_b"])
def _tree_attention_kernel(
    query, key, value, out, partial, partial_highest, partial_total,
    lengths, first_slots, ancestors, query_depths, node_depths, block_tables, sinks,
    scale, softcap, window, queries, num_nodes, capacity, num_splits, num_tiles,
    query_stride_b, query_stride_h, query_stride_n, query_stride_d,
    key_stride_b, key_stride_h, key_stride_s, key_stride_d,
    value_stride_b, value_stride_h, value_stride_s, value_stride_d,
    out_stride_b, out_stride_n, out_stride_h, out_stride_d,
    ancestors_stride_b, ancestors_stride_n, ancestors_stride_w,
    query_depths_stride_b, query_depths_stride_n, node_depths_stride_b, node_depths_stride_n,
    block_tables_stride_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCKS_OF_STEP: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FIRST: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
    ONE_LOOP: tl.constexpr, ONE_WORD: tl.constexpr,
):  # fmt: skip
    """
    Program (tile and split, K/V head, row): attention of one tile of BLOCK_M (node, query head) pairs over one split
    of the keys. A split is a range of blocks of BLOCK_N keys, first the committed slots, then the nodes. Full blocks
    of committed slots are taken BLOCKS_OF_STEP at a time, other blocks (with ONE_LOOP all) one by one. With ONE_WORD
    the ancestors of a node fit in one word, which is read before the loops.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pair_inside = pairs < queries * GROUP
    nodes = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)

    query_offsets = row.to(tl.int64) * query_stride_b + heads * query_stride_h + nodes * query_stride_n
    query_tile = tl.load(
        query + query_offsets[:, None] + dims[None, :] * query_stride_d,
        mask=pair_inside[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    key += kv_head.to(tl.int64) * key_stride_h
    value += kv_head.to(tl.int64) * value_stride_h
    if PAGE_SIZE == 0:
        key += row.to(tl.int64) * key_stride_b
        value += row.to(tl.int64) * value_stride_b
    table = block_tables + row * block_tables_stride_b

    length = tl.load(lengths + row).to(tl.int32)
    start = 0
    if FIRST:
        start = tl.load(first_slots + row).to(tl.int32)
    if WINDOW:
        depths = tl.load(
            query_depths + row * query_depths_stride_b + nodes * query_depths_stride_n, mask=pair_inside, other=2**30
        ).to(tl.int32)
        start = tl.maximum(start, length + tl.min(depths, axis=0) - window + 1)
    else:
        depths = nodes
    start = tl.minimum(start, length)
    full_blocks = (length - start) // BLOCK_N
    committed_blocks = tl.cdiv(length - start, BLOCK_N)
    num_blocks = committed_blocks + tl.cdiv(num_nodes, BLOCK_N)
    # The last split has fewer blocks if it takes its nodes in a second loop, which waits for its first loads.
    weight = num_blocks if ONE_LOOP else num_blocks + BLOCKS_OF_WAITING
    begin = tl.minimum(split * weight // num_splits, num_blocks)
    end = tl.minimum((split + 1) * weight // num_splits, num_blocks)

    accumulated = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    in_block = tl.arange(0, BLOCK_N)

    steps = 0 if ONE_LOOP else tl.maximum(tl.minimum(end, full_blocks) - begin, 0) // BLOCKS_OF_STEP
    if ONE_WORD:
        node_words = ancestors + row * ancestors_stride_b + nodes * ancestors_stride_n
        only_words = tl.load(node_words, mask=pair_inside, other=0)
    in_step = tl.arange(0, BLOCK_N * BLOCKS_OF_STEP)
    for step in range(steps):
        slots = start + (begin + step * BLOCKS_OF_STEP) * BLOCK_N + in_step
        always = slots >= 0
        key_offsets = _slot_offsets(slots, always, table, key_stride_b, key_stride_s, PAGE_SIZE, WIDE)
        keys = tl.load(
            key + key_offsets[None, :] + dims[:, None] * key_stride_d, mask=(dims < HEAD_DIM)[:, None], other=0.0
        )
        value_offsets = _slot_offsets(slots, always, table, value_stride_b, value_stride_s, PAGE_SIZE, WIDE)
        values = tl.load(
            value + value_offsets[:, None] + value_dims[None, :] * value_stride_d,
            mask=(value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        allowed = (length + depths[:, None] - slots[None, :]) < window
        accumulated, highest, total = _attend(
            query_tile, keys, values, allowed, accumulated, highest, total, scale, softcap, WINDOW, SOFTCAP, PRECISION
        )

    for block in range(begin + steps * BLOCKS_OF_STEP, end):
        in_tree = block >= committed_blocks
        first_node = tl.maximum((block - committed_blocks) * BLOCK_N, 0)
        slots = tl.where(in_tree, length + first_node, start + block * BLOCK_N) + in_block
        # Nodes past the last slot (padding) have no keys: after a block table lies other memory.
        inside = slots < tl.minimum(tl.where(in_tree, length + num_nodes, length), capacity)
        # BLOCK_N divides 64: the nodes of a block share a word.
        if ONE_WORD:
            words = only_words
        else:
            words = tl.load(
                ancestors
                + row * ancestors_stride_b
                + nodes * ancestors_stride_n
                + (first_node // 64) * ancestors_stride_w,
                mask=pair_inside,
                other=0,
            )
        words = tl.where(in_tree, words, -1)
        bit_places = first_node % 64 + in_block
        allowed = inside[None, :] & (((words[:, None] >> bit_places[None, :].to(tl.int64)) & 1) != 0)
        if WINDOW:
            key_depths = tl.load(
                node_depths + row * node_depths_stride_b + (first_node + in_block) * node_depths_stride_n,
                mask=first_node + in_block < num_nodes,
                other=0,
            ).to(tl.int32)
            from_first_node = tl.where(in_tree, key_depths, slots - length)
            allowed = allowed & ((depths[:, None] - from_first_node[None, :]) < window)
        key_offsets = _slot_offsets(slots, inside, table, key_stride_b, key_stride_s, PAGE_SIZE, WIDE)
        keys = tl.load(
            key + key_offsets[None, :] + dims[:, None] * key_stride_d,
            mask=(dims < HEAD_DIM)[:, None] & inside[None, :],
            other=0.0,
        )
        value_offsets = _slot_offsets(slots, inside, table, value_stride_b, value_stride_s, PAGE_SIZE, WIDE)
        values = tl.load(
            value + value_offsets[:, None] + value_dims[None, :] * value_stride_d,
            mask=(value_dims < VALUE_DIM)[None, :] & inside[:, None],
            other=0.0,
        )
        accumulated, highest, total = _attend(
            query_tile, keys, values, allowed, accumulated, highest, total, scale, softcap, True, SOFTCAP, PRECISION
        )

    value_inside = pair_inside[:, None] & (value_dims < VALUE_DIM)[None, :]
    if SPLIT:
        kv_heads = tl.num_programs(1)
        share_offset = (split * tl.num_programs(2) + row) * kv_heads + kv_head
        pair_offsets = share_offset.to(tl.int64) * (queries * GROUP) + pairs
        tl.store(partial_highest + pair_offsets, highest, mask=pair_inside)
        tl.store(partial_total + pair_offsets, total, mask=pair_inside)
        tl.store(partial + pair_offsets[:, None] * VALUE_DIM + value_dims[None, :], accumulated, mask=value_inside)
    else:
        if SINKS:
            sink = tl.load(sinks + heads, mask=pair_inside, other=0.0).to(tl.float32) * LOG2_E
            new_highest = tl.maximum(highest, sink)
            accumulated *= tl.exp2(highest - new_highest)[:, None]
            total = total * tl.exp2(highest - new_highest) + tl.exp2(sink - new_highest)
        attended = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        out_offsets = row.to(tl.int64) * out_stride_b + nodes * out_stride_n + heads * out_stride_h
        tl.store(
            out + out_offsets[:, None] + value_dims[None, :] * out_stride_d,
            attended.to(out.dtype.element_ty),
            mask=value_inside,
        )


@triton.jit(do_not_specialize=["queries", "num_splits"])
def _combine_kernel(
    out, partial, partial_highest, partial_total, sinks, queries, num_splits,
    out_stride_b, out_stride_n, out_stride_h, out_stride_d,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_SPLITS: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_P (node, query head) pairs, K/V head, row): joins the partial results of all splits."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # until the first kernel has written the partial results
    pairs = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    pair_inside = pairs < queries * GROUP
    nodes = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    splits = tl.arange(0, BLOCK_SPLITS)
    inside = pair_inside[:, None] & (splits < num_splits)[None, :]
    value_dims = tl.arange(0, BLOCK_V)
    value_inside = value_dims < VALUE_DIM
    shares = (splits * tl.num_programs(2) + row) * KV_HEADS + kv_head
    offsets = shares.to(tl.int64)[None, :] * (queries * GROUP) + pairs[:, None]
    accumulated = tl.load(
        partial + offsets[:, :, None] * VALUE_DIM + value_dims[None, None, :],
        mask=inside[:, :, None] & value_inside[None, None, :],
        other=0.0,
    )
    highest = tl.load(partial_highest + offsets, mask=inside, other=float("-inf"))
    total = tl.load(partial_total + offsets, mask=inside, other=0.0)
    if OVERLAP:
        # After the loads: launched right after the wait, the next kernel was slower, probably since its programs were
        # placed two on one multiprocessor while programs of this kernel held others.
        tl.extra.cuda.gdc_launch_dependents()
    shift = tl.max(highest, axis=1)
    if SINKS:
        sink = tl.load(sinks + heads, mask=pair_inside, other=0.0).to(tl.float32) * LOG2_E
        shift = tl.maximum(shift, sink)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    weights = tl.exp2(highest - shift[:, None])
    all_total = tl.sum(total * weights, axis=1)
    if SINKS:
        all_total += tl.exp2(sink - shift)
    attended = tl.sum(accumulated * weights[:, :, None], axis=1) / tl.where(all_total > 0.0, all_total, 1.0)[:, None]
    out_offsets = row.to(tl.int64) * out_stride_b + nodes * out_stride_n + heads * out_stride_h
    tl.store(
        out + out_offsets[:, None] + value_dims[None, :] * out_stride_d,
        attended.to(out.dtype.element_ty),
        mask=pair_inside[:, None] & value_inside[None, :],
    )


# --------------------------------------------------------------------------------------------------------- the launch


def launch_tree_attention(
    query, key, value, lengths, ancestors, num_nodes, first_slots, query_depths, node_depths, block_tables, sinks,
    scale, window, softcap, num_splits, out, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.tree_attention`; with `tiles` instead of the chosen ones."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    if out.numel() == 0:
        return
    group = heads // kv_heads
    pairs = queries * group
    paged = block_tables is not None
    capacity = block_tables.shape[1] * key.shape[2] if paged else key.shape[2]
    slots = min(capacity, capacity if window is None else window + num_nodes)
    launch = plan_launch(
        pairs, batch * kv_heads, slots, num_nodes, max(head_dim, value_dim), query.dtype,
        num_multiprocessors(query.device), shared_memory_limit(query.device), paged, window is not None,
        tiles, num_splits,
    )  # fmt: skip
    tiles, num_tiles, num_splits = launch.tiles, launch.num_tiles, launch.num_splits
    overlap = can_overlap(query.device)
    partial = partial_highest = partial_total = out
    if num_splits > 1:
        shares = (num_splits, batch, kv_heads, pairs)
        partial = query.new_empty(*shares, value_dim, dtype=torch.float32)
        # Each of its own: code for addresses that are no multiples of 16 bytes is compiled apart.
        partial_highest, partial_total = (query.new_empty(shares, dtype=torch.float32) for _ in range(2))
    lengths, first_slots, sinks, block_tables = (
        tensor if tensor is None else tensor.contiguous() for tensor in (lengths, first_slots, sinks, block_tables)
    )
    query_depths = ancestors if query_depths is None else query_depths  # not read without a window
    node_depths = ancestors if node_depths is None else node_depths
    block_v = triton.next_power_of_2(max(value_dim, 16))
    # `scale` converts scores to powers of two, unless a soft cap must be applied first.
    scale = scale * LOG2_E.value if softcap is None else scale / softcap
    launcher(_tree_attention_kernel, (num_tiles * num_splits, kv_heads, batch))(
        query, key, value, out, partial, partial_highest, partial_total,
        lengths, lengths if first_slots is None else first_slots, ancestors, query_depths, node_depths,
        block_tables if paged else lengths, lengths if sinks is None else sinks,
        scale, softcap or 0.0, window or 0, queries, num_nodes, capacity, num_splits, num_tiles,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(),
        *_strides(ancestors), *_strides(query_depths)[:2], *_strides(node_depths)[:2],
        block_tables.stride(0) if paged else 0,
        GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        BLOCK_D=triton.next_power_of_2(max(head_dim, 16)), BLOCK_V=block_v,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCKS_OF_STEP=tiles.blocks_of_step,
        SPLIT=num_splits > 1, WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        FIRST=first_slots is not None, PAGE_SIZE=key.shape[2] if paged else 0,
        WIDE=key.shape[2] * max(key.stride(2), value.stride(2)) >= 2**31,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", OVERLAP=overlap,
        ONE_LOOP=launch.one_loop, ONE_WORD=launch.one_word,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options_of_launch(overlap),
    )  # fmt: skip
    if num_splits > 1:
        block_splits = triton.next_power_of_2(num_splits)
        combined = _COMBINED_OF_MANY if num_splits >= _MANY_SPLITS else _COMBINED
        block_p = max(1, min(combined // (block_splits * block_v), triton.next_power_of_2(pairs)))
        launcher(_combine_kernel, (triton.cdiv(pairs, block_p), kv_heads, batch))(
            out, partial, partial_highest, partial_total, lengths if sinks is None else sinks, queries, num_splits,
            *out.stride(),
            KV_HEADS=kv_heads, GROUP=group, VALUE_DIM=value_dim, BLOCK_P=block_p, BLOCK_V=block_v,
            BLOCK_SPLITS=block_splits, SINKS=sinks is not None, OVERLAP=overlap,
            num_warps=4, **options_of_launch(overlap),
        )  # fmt: skip


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor, 0 along a first dimension that all rows share."""
    return (0 if tensor.shape[0] == 1 else tensor.stride(0), *tensor.stride()[1:])
