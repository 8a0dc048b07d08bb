"""
Parts of the kernels of matrix states, in Triton: products with a state, the commit of a path, and the inverse that the
delta rule takes.

A program holds a tile of a state, [BLOCK_K, BLOCK_V] of keys and values, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .compilation import launcher
from .devices import num_multiprocessors


BLOCK_P = tl.constexpr(16)
"""Nodes of a path that are committed at a time."""
EPSILON = tl.constexpr(1e-6)


@triton.jit
def finite(values):
    """The values, 0 where they are not finite: a void node must reach no other one."""
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit
def softplus(values):
    """log(1 + e^x) without loss where e^x is small, x where that is the same to float32."""
    small = tl.exp(tl.minimum(values, 20.0))
    rounded = 1.0 + small  # the quotient below makes up for its rounding
    found = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / tl.maximum(rounded - 1.0, 1e-30)))
    return tl.where(values > 20.0, values, found)


@triton.jit
def inverse_norm(vectors, NORMALIZE: tl.constexpr):
    """One over the L2 norm of every row, in float32; 1 unless NORMALIZE."""
    squares = tl.sum(vectors * vectors, axis=1)
    return 1.0 / tl.sqrt(squares + EPSILON) if NORMALIZE else squares * 0.0 + 1.0


@triton.jit
def single(left, right):
    """The product of float32 matrices, in three products of tensor cores."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def product(left, right, PARTS: tl.constexpr):
    """
    `left @ right` of activations and float32 values, in float32. The values are split into PARTS of the activations'
    dtype, of which each adds its bits (8 of bfloat16); with 0 all is multiplied as float32.
    """
    if PARTS == 0:
        return single(left.to(tl.float32), right)
    part = right.to(left.dtype)
    result = tl.dot(left, part)
    for _ in tl.static_range(PARTS - 1):
        right -= part.to(tl.float32)
        part = right.to(left.dtype)
        result = tl.dot(left, part, result)
    return result


@triton.jit
def product_in_parts(left, right, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """
    The product of float32 matrices, each as two parts of the activations' dtype (16 bits of bfloat16) if PARTS is not
    0: half the tensor cores' work of `single`, and no splitting of what several warps read.
    """
    if PARTS == 0:
        return single(left, right)
    left_part, right_part = left.to(DTYPE), right.to(DTYPE)
    left_rest = (left - left_part.to(tl.float32)).to(DTYPE)
    right_rest = (right - right_part.to(tl.float32)).to(DTYPE)
    return tl.dot(left_part, right_part, tl.dot(left_part, right_rest, tl.dot(left_rest, right_part)))


@triton.jit
def product_of_activations(left, right, PARTS: tl.constexpr):
    """The inner products of the rows of two matrices of activations, in float32; with PARTS of 0 as of float32."""
    if PARTS == 0:
        return single(left.to(tl.float32), tl.trans(right.to(tl.float32)))
    return tl.dot(left, tl.trans(right))


@triton.jit
def commit_path(
    state, keys, deltas, decays, path, count, dims, value_dims,
    key_stride_n, delta_stride_n, decay_stride_n,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, NORMALIZE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """
    The state after the first `count` nodes of a path: e^(G of the last) times the old one, and Σ e^(G of the last − G)
    k uᵀ. With CHANNELS, G is per key. Pointers are those of the slot and head.
    """
    if count > 0:
        last = tl.load(path + count - 1).to(tl.int64)
        if CHANNELS:
            end = tl.load(decays + last * decay_stride_n + dims, mask=dims < KEY_DIM, other=0.0)
            state *= tl.exp(end)[:, None]
        else:
            end = tl.load(decays + last * decay_stride_n)
            state *= tl.exp(end)
        for first in range(0, count, BLOCK_P):
            places = first + tl.arange(0, BLOCK_P)
            inside = places < count
            nodes = tl.load(path + places, mask=inside, other=0).to(tl.int64)
            key_inside = inside[:, None] & (dims < KEY_DIM)[None, :]
            key = tl.load(keys + nodes[:, None] * key_stride_n + dims[None, :], mask=key_inside, other=0.0)
            delta = tl.load(
                deltas + nodes[:, None] * delta_stride_n + value_dims[None, :],
                mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            weights = inverse_norm(key.to(tl.float32), NORMALIZE)
            if CHANNELS:
                before = tl.load(decays + nodes[:, None] * decay_stride_n + dims[None, :], mask=key_inside, other=0.0)
                weighted = key.to(tl.float32) * weights[:, None] * tl.exp(end[None, :] - before)
                state += single(tl.trans(weighted), delta)
            else:
                before = tl.load(decays + nodes * decay_stride_n, mask=inside, other=0.0)
                weights *= tl.exp(end - before)
                state += product(tl.trans(key), delta * weights[:, None], PARTS)
    return state


@triton.jit
def inverse(lower, depths, LEVELS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """
    (I + L)⁻¹, where L_ij is 0 unless node j is above node i: inverses of spans of twice as many levels at a time, by
    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]. Powers of L would cancel where a chain has similar keys.

    Nodes have at most 2^LEVELS levels. Where there are fewer, the last spans add nothing, yet are not left out: Triton
    3.6 compiles these products to wrong code in a loop or a branch (numbers on an H200 were wrong, or addresses).
    """
    nodes = tl.arange(0, BLOCK_N)
    crossing = _crossing(depths, 1)
    found = tl.where(nodes[:, None] == nodes[None, :], 1.0, 0.0) - tl.where(crossing, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        between = tl.where(_crossing(depths, 1 << level), lower, 0.0)
        found -= product_in_parts(found, product_in_parts(between, found, PARTS, DTYPE), PARTS, DTYPE)
    return found


@triton.jit
def _crossing(depths, span):
    """Whether two levels are in the same span of 2 · `span` levels and in different halves of it."""
    halves = depths // span
    wholes = halves // 2
    return (wholes[:, None] == wholes[None, :]) & (halves[:, None] != halves[None, :])


@triton.jit(do_not_specialize=["width"])
def _commit_kernel(
    states, keys, deltas, decays, slots, turns, path, counts, width,
    key_stride_t, key_stride_b, key_stride_n, decay_stride_t, decay_stride_b, decay_stride_n,
    delta_stride_b, delta_stride_n,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHANNELS: tl.constexpr, NORMALIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_V values, head, row)."""
    value_dims = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    row = tl.program_id(2)
    dims = tl.arange(0, BLOCK_K)
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.where(slot >= 0, tl.minimum(tl.load(counts + row).to(tl.int32), width), 0)
    slot = tl.maximum(slot, 0)
    turn = tl.load(turns + slot).to(tl.int64) & 1
    states += (slot * HEADS + head) * KEY_DIM * VALUE_DIM
    keys += turn * key_stride_t + slot * key_stride_b + (head // GROUP) * KEY_DIM
    decays += turn * decay_stride_t + slot * decay_stride_b + head * (KEY_DIM if CHANNELS else 1)
    deltas += slot * delta_stride_b + head * VALUE_DIM
    if count > 0:
        if TRANSPOSED:
            places = states + dims[:, None] + value_dims[None, :] * KEY_DIM
        else:
            places = states + dims[:, None] * VALUE_DIM + value_dims[None, :]
        inside = (dims < KEY_DIM)[:, None] & (value_dims < VALUE_DIM)[None, :]
        state = tl.load(places, mask=inside, other=0.0)
        state = commit_path(
            state, keys, deltas, decays, path + row.to(tl.int64) * width, count, dims, value_dims,
            key_stride_n, delta_stride_n, decay_stride_n, KEY_DIM, VALUE_DIM, CHANNELS, NORMALIZE, PARTS,
        )  # fmt: skip
        tl.store(places, state, mask=inside)


def launch_commit(
    states, keys, deltas, decays, slots, turns, path, counts, normalize, transposed=False, parts=None
) -> None:
    """Commits paths to states of `[slots, heads, key_dim, value_dim]`, or with the last two dimensions transposed."""
    heads, (key_dim, value_dim) = states.shape[1], (keys.shape[-1], deltas.shape[-1])
    if len(slots) == 0:
        return
    block_v = values_of_a_program(key_dim, value_dim, heads * len(slots), states.device)
    launcher(_commit_kernel, (triton.cdiv(value_dim, block_v), heads, len(slots)))(
        states, keys, deltas, decays, slots.contiguous(), turns.contiguous(), path.contiguous(), counts.contiguous(),
        path.shape[1], *keys.stride()[:3], *decays.stride()[:3], *deltas.stride()[:2],
        HEADS=heads, GROUP=heads // keys.shape[3], KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)), BLOCK_V=block_v, CHANNELS=decays.dim() == 5,
        NORMALIZE=normalize, TRANSPOSED=transposed, PARTS=parts_of(keys.dtype) if parts is None else parts,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def parts_of(dtype: torch.dtype) -> int:
    """Parts into which products of activations of a dtype split float32 values, so that they keep 24 bits."""
    return 3 if dtype == torch.bfloat16 else 0


def values_of_a_program(key_dim: int, value_dim: int, heads: int, device: torch.device) -> int:
    """
    Values of a state that a program takes: 64, or 32 if there would be fewer programs than multiprocessors or too many
    keys for one program. 16 are too few for what Triton 3.6 makes of products with 64 nodes.
    """
    many = heads * triton.cdiv(value_dim, 64) >= num_multiprocessors(device)
    return 64 if many and key_dim <= 128 and value_dim > 32 else 32
