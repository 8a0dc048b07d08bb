"""The delta rule over a tree in Triton: a program for each row, head and tile of values."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, options_of_launch
from ..pending import unit_stride
from ..triton_states import (
    commit_path,
    finite,
    inverse,
    inverse_norm,
    launch_commit,
    parts_of,
    product,
    product_in_parts,
    product_of_activations,
    single,
    values_of_a_program,
)


MOST_AT_ONCE = 32
"""Most nodes that a launch scores: of more, products spill registers, and Triton 3.6 makes wrong code of them."""


class Tiles(NamedTuple):
    """
    How a launch is divided.

    Args:
        block_v (`int`): values of a state that a program takes, a power of two from 32 on.
        parts (`int`): parts of float32 values in products with activations, see `product`; 0 multiplies as float32.
        num_warps (`int`): warps of a program.
        registers (`int`, *optional*): most registers of a thread.
        stack (`bool`): whether keys and queries are the rows of one matrix. With 32 nodes it has 64: operands of its
            products stay in shared memory.
    """

    block_v: int
    parts: int
    num_warps: int = 4
    registers: int | None = None
    stack: bool = False

    def limits(self) -> dict[str, int]:
        """The launch's options for `registers`."""
        return {} if self.registers is None else {"maxnreg": self.registers}


@triton.jit(do_not_specialize=["nodes", "width", "ancestors_stride_b"])
def _tree_delta_rule_kernel(
    query, key, value, decay, beta, states, keys, deltas, decays, ancestors, slots, turns, path, counts, out,
    scale, nodes, width,
    query_stride_b, query_stride_n, query_stride_h, key_stride_b, key_stride_n, key_stride_h,
    value_stride_b, value_stride_n, value_stride_h, ancestors_stride_b,
    kept_key_stride_t, kept_key_stride_b, kept_key_stride_n, kept_decay_stride_t, kept_decay_stride_b,
    kept_decay_stride_n, delta_stride_b, delta_stride_n,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FIRST: tl.constexpr, LEVELS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr, NORMALIZE: tl.constexpr, PARTS: tl.constexpr, COMMIT_PARTS: tl.constexpr,
    STACK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Program (BLOCK_V values, head, row): commits the path that is pending, then scores the first BLOCK_N nodes. With
    FIRST, it scores those from there on, after a launch for all nodes before.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    value_block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    wide_row = row.to(tl.int64)
    key_head = head // GROUP
    dims = tl.arange(0, BLOCK_K)
    value_dims = value_block * BLOCK_V + tl.arange(0, BLOCK_V)
    at = FIRST + tl.arange(0, BLOCK_N)
    is_node = at < nodes
    key_inside = is_node[:, None] & (dims < KEY_DIM)[None, :]
    value_inside = is_node[:, None] & (value_dims < VALUE_DIM)[None, :]

    slot = tl.load(slots + row).to(tl.int64)
    # Of a row without a slot nothing is kept.
    kept = at < tl.where(slot >= 0, nodes, 0)
    count = tl.where(slot >= 0, tl.minimum(tl.load(counts + row).to(tl.int32), width), 0)
    slot = tl.maximum(slot, 0)
    places = states + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + value_dims[None, :]
    state_inside = (dims < KEY_DIM)[:, None] & (value_dims < VALUE_DIM)[None, :]
    state = tl.load(places, mask=state_inside, other=0.0)
    turn = tl.load(turns + slot).to(tl.int64) & 1
    keys += slot * kept_key_stride_b + key_head * KEY_DIM
    decays += slot * kept_decay_stride_b + head * (KEY_DIM if CHANNELS else 1)
    deltas += slot * delta_stride_b + head * VALUE_DIM

    # The nodes' own values are loaded before the commit, which waits for its path.
    words = tl.load(ancestors + wide_row * ancestors_stride_b + at, mask=is_node, other=0)
    key += wide_row * key_stride_b + key_head * key_stride_h
    own_keys = tl.load(key + at[:, None] * key_stride_n + dims[None, :], mask=key_inside, other=0.0)
    own_keys = finite(own_keys.to(tl.float32)).to(own_keys.dtype)
    query += wide_row * query_stride_b + key_head * query_stride_h
    if STACK:
        both = _keys_and_queries(key, query, key_stride_n, query_stride_n, nodes, dims, FIRST, BLOCK_N, KEY_DIM)
    else:
        own_queries = tl.load(query + at[:, None] * query_stride_n + dims[None, :], mask=key_inside, other=0.0)
    value += wide_row * value_stride_b + head * value_stride_h
    own_values = tl.load(value + at[:, None] * value_stride_n + value_dims[None, :], mask=value_inside, other=0.0)
    of_nodes = (wide_row * nodes + at) * HEADS + head
    own_beta = finite(tl.load(beta + of_nodes, mask=is_node, other=0.0).to(tl.float32))

    if FIRST == 0:
        state = commit_path(
            state, keys + turn * kept_key_stride_t, deltas, decays + turn * kept_decay_stride_t,
            path + wide_row * width, count, dims, value_dims, kept_key_stride_n, delta_stride_n, kept_decay_stride_n,
            KEY_DIM, VALUE_DIM, CHANNELS, NORMALIZE, COMMIT_PARTS,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read what is pending
        tl.store(places, state, mask=state_inside & (dims < tl.where(count > 0, KEY_DIM, 0))[:, None])
    keys += (1 - turn) * kept_key_stride_t
    decays += (1 - turn) * kept_decay_stride_t

    # below[i, j]: node j is node i or above it. Levels count from the first node of the path among these.
    below = ((words[:, None] >> at[None, :].to(tl.int64)) & 1) != 0
    depths = tl.sum(below.to(tl.int32), axis=1) - 1
    if STACK:
        weights = tl.reshape(inverse_norm(both.to(tl.float32), NORMALIZE), (2, BLOCK_N))
        key_weights, query_weights = tl.split(tl.permute(weights, (1, 0)))
    else:
        key_weights = inverse_norm(own_keys.to(tl.float32), NORMALIZE)
        query_weights = inverse_norm(own_queries.to(tl.float32), NORMALIZE)
    query_weights *= scale
    if FIRST > 0:
        earlier = tl.arange(0, FIRST)
        above = ((words[:, None] >> earlier[None, :].to(tl.int64)) & 1) != 0
        their_keys = tl.load(
            keys + earlier[:, None] * kept_key_stride_n + dims[None, :], mask=(dims < KEY_DIM)[None, :], other=0.0
        )
        their_deltas = tl.load(
            deltas + earlier[:, None] * delta_stride_n + value_dims[None, :],
            mask=(value_dims < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        their_weights = inverse_norm(their_keys.to(tl.float32), NORMALIZE)
    if CHANNELS:
        lower, attended, their_lower, their_attended, total = _pairs_of_channels(
            own_queries, own_keys, key, decay + of_nodes[:, None] * KEY_DIM + dims[None, :], words, key_inside,
            key_stride_n, HEADS * KEY_DIM, dims, FIRST, BLOCK_N, KEY_DIM,
        )  # fmt: skip
        decayed = tl.exp(total)
        known = single(own_keys.to(tl.float32) * decayed, state)
        read = single(own_queries.to(tl.float32) * decayed, state)
    else:
        # The last use of the state: what follows takes its registers.
        if STACK:
            known, read = _halves(product(both, state, PARTS), BLOCK_N)
            lower, attended = _halves(product_of_activations(both, own_keys, PARTS), BLOCK_N)
        else:
            known = product(own_keys, state, PARTS)
            read = product(own_queries, state, PARTS)
            lower = product_of_activations(own_keys, own_keys, PARTS)
            attended = product_of_activations(own_queries, own_keys, PARTS)
        log_decay = finite(tl.load(decay + of_nodes, mask=is_node, other=0.0))
        total = tl.sum(tl.where(below, log_decay[None, :], 0.0), axis=1)
        if FIRST > 0:
            their_log_decay = finite(tl.load(decay + (wide_row * nodes + earlier) * HEADS + head))
            total += tl.sum(tl.where(above, their_log_decay[None, :], 0.0), axis=1)
        known *= tl.exp(total)[:, None]
        read *= tl.exp(total)[:, None]
        between = tl.exp(tl.where(below, total[:, None] - total[None, :], float("-inf")))
        lower *= between
        attended *= between
        if FIRST > 0:
            their_total = tl.load(decays + earlier * kept_decay_stride_n)
            since = tl.exp(tl.where(above, total[:, None] - their_total[None, :], float("-inf")))
            if STACK:
                their_lower, their_attended = _halves(product_of_activations(both, their_keys, PARTS), BLOCK_N)
            else:
                their_lower = product_of_activations(own_keys, their_keys, PARTS)
                their_attended = product_of_activations(own_queries, their_keys, PARTS)
            their_lower *= since
            their_attended *= since
    lower *= (own_beta * key_weights)[:, None] * key_weights[None, :]
    lower = tl.where(at[:, None] == at[None, :], 0.0, lower)
    delta = own_beta[:, None] * (finite(own_values.to(tl.float32)) - key_weights[:, None] * known)
    if FIRST > 0:
        their_lower *= (own_beta * key_weights)[:, None] * their_weights[None, :]
        delta -= product_in_parts(their_lower, their_deltas, PARTS, own_keys.dtype)
        read += product_in_parts(their_attended * their_weights[None, :], their_deltas, PARTS, own_keys.dtype)
    delta = product_in_parts(
        inverse(lower, depths, LEVELS, BLOCK_N, PARTS, own_keys.dtype), delta, PARTS, own_keys.dtype
    )
    read += product_in_parts(attended * key_weights[None, :], delta, PARTS, own_keys.dtype)
    result = query_weights[:, None] * read

    out += (wide_row * nodes + at[:, None]) * (HEADS * VALUE_DIM) + head * VALUE_DIM + value_dims[None, :]
    tl.store(out, tl.where(kept[:, None], result, 0.0).to(out.dtype.element_ty), mask=value_inside)
    tl.store(deltas + at[:, None] * delta_stride_n + value_dims[None, :], delta, mask=value_inside & kept[:, None])
    if value_block == 0:
        if CHANNELS:
            tl.store(
                decays + at[:, None] * kept_decay_stride_n + dims[None, :], total, mask=key_inside & kept[:, None]
            )
        else:
            tl.store(decays + at * kept_decay_stride_n, total, mask=kept)
        if head % GROUP == 0:
            tl.store(keys + at[:, None] * kept_key_stride_n + dims[None, :], own_keys, mask=key_inside & kept[:, None])


@triton.jit
def _keys_and_queries(
    key, query, key_stride_n, query_stride_n, nodes, dims, FIRST: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_DIM: tl.constexpr,
):  # fmt: skip
    """The keys of the nodes, then their queries: rows of one matrix."""
    rows = tl.arange(0, 2 * BLOCK_N)
    at = FIRST + rows % BLOCK_N
    ends = tl.where(
        (rows < BLOCK_N)[:, None],
        key + at[:, None] * key_stride_n + dims[None, :],
        query + at[:, None] * query_stride_n + dims[None, :],
    )
    found = tl.load(ends, mask=(at < nodes)[:, None] & (dims < KEY_DIM)[None, :], other=0.0)
    return finite(found.to(tl.float32)).to(found.dtype)


@triton.jit
def _halves(matrix, BLOCK_N: tl.constexpr):
    """The first BLOCK_N rows, and the others."""
    return tl.split(tl.permute(tl.reshape(matrix, (2, BLOCK_N, matrix.shape[1])), (1, 2, 0)))


@triton.jit
def _pairs_of_channels(
    own_queries, own_keys, key, decay, words, inside, key_stride_n, decay_stride_n, dims,
    FIRST: tl.constexpr, BLOCK_N: tl.constexpr, KEY_DIM: tl.constexpr,
):  # fmt: skip
    """
    Σ_c k_ic k_jc e^(G_ic − G_jc) and Σ_c q_ic k_jc e^(G_ic − G_jc) of every node i and its ancestors j, first among
    these nodes, then among those before FIRST; and G. No product of matrices has these without exponents above 0:
    every node goes up its path, a level at a time.
    """
    at = FIRST + tl.arange(0, BLOCK_N)
    earlier = tl.arange(0, BLOCK_N)
    keys, queries = own_keys.to(tl.float32), own_queries.to(tl.float32)
    total = finite(tl.load(decay, mask=inside, other=0.0))
    lower = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    attended = tl.where(at[:, None] == at[None, :], tl.sum(queries * keys, axis=1)[:, None], 0.0)
    their_lower, their_attended = lower, lower
    every = tl.arange(0, FIRST + BLOCK_N)
    path = ((words[:, None] >> every[None, :].to(tl.int64)) & 1) != 0
    deepest = tl.max(tl.sum(path.to(tl.int32), axis=1), axis=0) - 1
    above = at
    for _ in range(deepest):
        above = tl.max(tl.where(path & (every[None, :] < above[:, None]), every[None, :], -1), axis=1)
        found = (above >= 0)[:, None] & (dims < KEY_DIM)[None, :]
        theirs = tl.load(key + above[:, None] * key_stride_n + dims[None, :], mask=found, other=0.0)
        theirs = finite(theirs.to(tl.float32)) * tl.exp(total)
        of_keys, of_queries = tl.sum(keys * theirs, axis=1)[:, None], tl.sum(queries * theirs, axis=1)[:, None]
        is_above = above[:, None] == at[None, :]
        lower += tl.where(is_above, of_keys, 0.0)
        attended += tl.where(is_above, of_queries, 0.0)
        if FIRST > 0:
            is_earlier = above[:, None] == earlier[None, :]
            their_lower += tl.where(is_earlier, of_keys, 0.0)
            their_attended += tl.where(is_earlier, of_queries, 0.0)
        total += finite(tl.load(decay + (above - at)[:, None] * decay_stride_n, mask=found, other=0.0))
    return lower, attended, their_lower, their_attended, total


def launch_tree_delta_rule(
    query, key, value, decay, beta, states, keys, deltas, decays, ancestors, slots, turns, path, counts,
    normalize, scale, max_depth, out, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """See `hf_specdec_kernels.tree_delta_rule`; with `tiles` instead of the chosen ones."""
    batch, nodes, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    if batch == 0:
        return
    tiles = choose_tiles(key, value) if tiles is None else tiles
    query, key, value = (unit_stride(tensor) for tensor in (query, key, value))
    overlap = can_overlap(query.device)
    decay, beta, ancestors = decay.contiguous(), beta.contiguous(), ancestors.contiguous()
    block_n = max(16, min(triton.next_power_of_2(nodes), MOST_AT_ONCE))
    deepest = min(max_depth, block_n - 1)
    for first in range(0, nodes, MOST_AT_ONCE):
        launcher(_tree_delta_rule_kernel, (triton.cdiv(value_dim, tiles.block_v), heads, batch))(
            query, key, value, decay, beta, states, keys, deltas, decays, ancestors,
            slots.contiguous(), turns.contiguous(), path.contiguous(), counts.contiguous(), out,
            scale, nodes, path.shape[1],
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], 0 if len(ancestors) == 1 else nodes,
            *keys.stride()[:3], *decays.stride()[:3], *deltas.stride()[:2],
            HEADS=heads, GROUP=heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, FIRST=first,
            LEVELS=deepest.bit_length(), BLOCK_N=block_n, BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
            BLOCK_V=tiles.block_v, CHANNELS=decay.dim() == 4, NORMALIZE=normalize, PARTS=tiles.parts,
            COMMIT_PARTS=tiles.parts and tiles.parts + 1, STACK=tiles.stack and decay.dim() == 3,
            OVERLAP=overlap, num_warps=tiles.num_warps, num_stages=1,
            **tiles.limits(), **options_of_launch(overlap),
        )  # fmt: skip


def choose_tiles(key, value) -> Tiles:
    """Tiles of a launch."""
    batch, nodes, heads, value_dim = value.shape
    block_v = values_of_a_program(key.shape[3], value_dim, heads * batch, key.device)
    # Two parts suffice for outputs that are rounded to bfloat16.
    parts = min(parts_of(key.dtype), 2)
    # Four warps repeat less work than eight, but spill where operands are large; stacked, 64 values do not (40 µs in
    # place of 62 for 32 nodes of eight rows of a 4B-like layer, on an H200).
    stack = nodes > 16 and block_v > 32 and parts > 0
    few = nodes <= 16 or stack or (key.shape[3] <= 128 and parts > 0)
    return Tiles(block_v, parts, 4 if few else 8, stack=stack)


def launch_commit_delta_rule(states, keys, deltas, decays, slots, turns, path, counts, normalize) -> None:
    """See `hf_specdec_kernels.commit_delta_rule`."""
    launch_commit(states, keys, deltas, decays, slots, turns, path, counts, normalize)
