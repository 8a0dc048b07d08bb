"""The recurrence of Mamba-2 over a tree in Triton: a program for each row, head and tile of its channels."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, options_of_launch
from ..pending import unit_stride
from ..triton_states import (
    commit_path,
    finite,
    launch_commit,
    parts_of,
    product,
    product_of_activations,
    single,
    softplus,
    values_of_a_program,
)


@triton.jit(do_not_specialize=["nodes", "width", "ancestors_stride_b"])
def _tree_ssd_kernel(
    x, dt, rates, input_keys, queries, states, keys, deltas, decays, ancestors, slots, turns, path, counts, skip,
    dt_bias, out, dt_least, dt_most, nodes, width,
    x_stride_b, x_stride_n, x_stride_h, key_stride_b, key_stride_n, key_stride_h,
    query_stride_b, query_stride_n, query_stride_h, ancestors_stride_b,
    kept_key_stride_t, kept_key_stride_b, kept_key_stride_n, kept_decay_stride_t, kept_decay_stride_b,
    kept_decay_stride_n, delta_stride_b, delta_stride_n,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, PARTS: tl.constexpr, COMMIT_PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_V channels, head, row): commits the path that is pending, then scores the nodes."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    value_block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    wide_row = row.to(tl.int64)
    dims = tl.arange(0, BLOCK_K)
    value_dims = value_block * BLOCK_V + tl.arange(0, BLOCK_V)
    at = tl.arange(0, BLOCK_N)
    is_node = at < nodes
    key_inside = is_node[:, None] & (dims < KEY_DIM)[None, :]
    value_inside = is_node[:, None] & (value_dims < VALUE_DIM)[None, :]

    slot = tl.load(slots + row).to(tl.int64)
    # Of a row without a slot nothing is kept.
    kept = at < tl.where(slot >= 0, nodes, 0)
    count = tl.where(slot >= 0, tl.minimum(tl.load(counts + row).to(tl.int32), width), 0)
    slot = tl.maximum(slot, 0)
    # A state is [channels, keys] in memory, its transpose here.
    places = states + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + dims[:, None] + value_dims[None, :] * KEY_DIM
    state_inside = (dims < KEY_DIM)[:, None] & (value_dims < VALUE_DIM)[None, :]
    state = tl.load(places, mask=state_inside, other=0.0)
    turn = tl.load(turns + slot).to(tl.int64) & 1
    keys += slot * kept_key_stride_b + (head // GROUP) * KEY_DIM
    decays += slot * kept_decay_stride_b + head
    deltas += slot * delta_stride_b + head * VALUE_DIM

    words = tl.load(ancestors + wide_row * ancestors_stride_b + at, mask=is_node, other=0)
    key_offsets = wide_row * key_stride_b + at[:, None] * key_stride_n + (head // GROUP) * key_stride_h
    own_keys = tl.load(input_keys + key_offsets + dims[None, :], mask=key_inside, other=0.0)
    own_keys = finite(own_keys.to(tl.float32)).to(own_keys.dtype)
    query_offsets = wide_row * query_stride_b + at[:, None] * query_stride_n + (head // GROUP) * query_stride_h
    own_queries = tl.load(queries + query_offsets + dims[None, :], mask=key_inside, other=0.0)
    x_offsets = wide_row * x_stride_b + at[:, None] * x_stride_n + head * x_stride_h
    inputs = finite(tl.load(x + x_offsets + value_dims[None, :], mask=value_inside, other=0.0).to(tl.float32))
    step = tl.load(dt + (wide_row * nodes + at) * HEADS + head, mask=is_node, other=0.0).to(tl.float32)
    if BIAS:
        step += tl.load(dt_bias + head).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    step = tl.where(is_node, tl.minimum(tl.maximum(finite(step), dt_least), dt_most), 0.0)
    rate = tl.load(rates + head)

    state = commit_path(
        state, keys + turn * kept_key_stride_t, deltas, decays + turn * kept_decay_stride_t, path + wide_row * width,
        count, dims, value_dims, kept_key_stride_n, delta_stride_n, kept_decay_stride_n,
        KEY_DIM, VALUE_DIM, False, False, COMMIT_PARTS,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read what is pending
    tl.store(places, state, mask=state_inside & (dims < tl.where(count > 0, KEY_DIM, 0))[:, None])

    result = product(own_queries, state, PARTS)  # the last use of the state: what follows takes its registers
    # below[i, j]: node j is node i or above it.
    below = ((words[:, None] >> at[None, :].to(tl.int64)) & 1) != 0
    total = tl.sum(tl.where(below, (rate * step)[None, :], 0.0), axis=1)
    result *= tl.exp(total)[:, None]
    between = tl.exp(tl.where(below, total[:, None] - total[None, :], float("-inf")))
    delta = step[:, None] * inputs
    attended = product_of_activations(own_queries, own_keys, PARTS) * between
    result += single(attended, delta)
    if SKIP:
        result += tl.load(skip + head).to(tl.float32) * inputs

    out += (wide_row * nodes + at[:, None]) * (HEADS * VALUE_DIM) + head * VALUE_DIM + value_dims[None, :]
    tl.store(out, tl.where(kept[:, None], result, 0.0).to(out.dtype.element_ty), mask=value_inside)
    tl.store(deltas + at[:, None] * delta_stride_n + value_dims[None, :], delta, mask=value_inside & kept[:, None])
    if value_block == 0:
        decays += (1 - turn) * kept_decay_stride_t
        tl.store(decays + at * kept_decay_stride_n, total, mask=kept)
        if head % GROUP == 0:
            keys += (1 - turn) * kept_key_stride_t
            tl.store(keys + at[:, None] * kept_key_stride_n + dims[None, :], own_keys, mask=key_inside & kept[:, None])


def launch_tree_ssd(
    x, dt, rates, input_keys, queries, states, keys, deltas, decays, ancestors, slots, turns, path, counts,
    skip, dt_bias, dt_softplus, dt_least, dt_most, out, parts: int | None = None,
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.tree_ssd`; with `parts` instead of those of the dtype."""
    batch, nodes, heads, value_dim = x.shape
    groups, key_dim = input_keys.shape[2:]
    if batch == 0:
        return
    parts = min(parts_of(x.dtype), 2) if parts is None else parts
    x, input_keys, queries = (unit_stride(tensor) for tensor in (x, input_keys, queries))
    block_v = values_of_a_program(key_dim, value_dim, heads * batch, x.device)
    overlap = can_overlap(x.device)
    launcher(_tree_ssd_kernel, (triton.cdiv(value_dim, block_v), heads, batch))(
        x, dt.contiguous(), rates.contiguous(), input_keys, queries, states, keys, deltas, decays,
        ancestors.contiguous(), slots.contiguous(), turns.contiguous(), path.contiguous(), counts.contiguous(),
        rates if skip is None else skip.contiguous(), rates if dt_bias is None else dt_bias.contiguous(), out,
        dt_least, dt_most, nodes, path.shape[1],
        *x.stride()[:3], *input_keys.stride()[:3], *queries.stride()[:3], 0 if len(ancestors) == 1 else nodes,
        *keys.stride()[:3], *decays.stride()[:3], *deltas.stride()[:2],
        HEADS=heads, GROUP=heads // groups, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_N=max(16, triton.next_power_of_2(nodes)), BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=block_v, SKIP=skip is not None, BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, PARTS=parts,
        COMMIT_PARTS=parts and parts + 1, OVERLAP=overlap,
        num_warps=8 if nodes > 16 else 4, num_stages=1, **options_of_launch(overlap),
    )  # fmt: skip


def launch_commit_ssd(states, keys, deltas, decays, slots, turns, path, counts) -> None:
    """See `hf_specdec_kernels.commit_ssd`."""
    launch_commit(states, keys, deltas, decays, slots, turns, path, counts, False, transposed=True)
