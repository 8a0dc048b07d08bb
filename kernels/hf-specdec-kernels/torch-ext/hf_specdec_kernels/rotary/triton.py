"""Rotary position embedding in Triton: a program turns some heads of one token's query or key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, options_of_launch


NUMBERS = 1024
"""Numbers of a program, about."""


@triton.jit
def _rounded(states, DTYPE: tl.constexpr):
    return states.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["nodes"])
def _rotary_kernel(
    query, key, cos, sin, out_query, out_key, nodes, heads, kv_heads, tiles,
    query_b, query_h, query_n, key_b, key_h, key_n,
    angle_b, angle_n,
    SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr,
    IN_PAIRS: tl.constexpr, OF_HALVES: tl.constexpr, DTYPE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): BLOCK_HEADS heads, of the queries in the first tiles, of the keys in those after them."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, node = token // nodes, token % nodes
    if tile < tiles:
        states, out = query + row * query_b + node * query_n, out_query + token * heads * SIZE
        count, stride = heads, query_h
    else:
        states, out = key + row * key_b + node * key_n, out_key + token * kv_heads * SIZE
        count, stride, tile = kv_heads, key_h, tile - tiles
    head = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK)
    of_head, in_half = (head < count)[:, None], pair < HALF
    inside = of_head & in_half[None, :]
    if IN_PAIRS:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    if OF_HALVES:
        angle, second_angle = pair, pair
    else:
        angle, second_angle = first, second
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    angles = row * angle_b + node * angle_n
    cos_0 = tl.load(cos + angles + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_1 = tl.load(cos + angles + second_angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_0 = tl.load(sin + angles + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angles + second_angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    place, out_place = head[:, None].to(tl.int64) * stride, head[:, None] * SIZE
    x_0 = tl.load(states + place + first[None, :], mask=inside, other=0.0).to(tl.float32)
    x_1 = tl.load(states + place + second[None, :], mask=inside, other=0.0).to(tl.float32)
    turned_0 = _rounded(x_0 * cos_0, DTYPE) + _rounded(-x_1 * sin_0, DTYPE)
    turned_1 = _rounded(x_1 * cos_1, DTYPE) + _rounded(x_0 * sin_1, DTYPE)
    tl.store(out + out_place + first[None, :], turned_0.to(out.dtype.element_ty), mask=inside)
    tl.store(out + out_place + second[None, :], turned_1.to(out.dtype.element_ty), mask=inside)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        of_rest = of_head & (rest < SIZE)[None, :]
        tl.store(out + out_place + rest[None, :], tl.load(states + place + rest[None, :], mask=of_rest), mask=of_rest)


def launch_rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str,
    in_float: bool,
    out_query: torch.Tensor,
    out_key: torch.Tensor,
) -> None:
    """See `hf_specdec_kernels.rotary`; writes to outputs that lie node by node in memory."""
    batch, heads, nodes, size = query.shape
    if not query.numel() or not cos.numel():
        out_query.copy_(query)
        out_key.copy_(key)
        return
    query, key = (one if one.stride(3) == 1 else one.contiguous() for one in (query, key))
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[2] // 2
    rest = size - 2 * half
    block = triton.next_power_of_2(half)
    block_heads = min(max(NUMBERS // (2 * block), 1), triton.next_power_of_2(max(heads, key.shape[1])))
    tiles, kv_tiles = triton.cdiv(heads, block_heads), triton.cdiv(key.shape[1], block_heads)
    overlap, in_float = can_overlap(query.device), in_float or torch.float32 in (query.dtype, cos.dtype)
    launcher(_rotary_kernel, (batch * nodes, tiles + kv_tiles))(
        query, key, cos, sin, out_query, out_key, nodes, heads, key.shape[1], tiles,
        *query.stride()[:3], *key.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(1),
        SIZE=size, HALF=half, BLOCK_HEADS=block_heads, BLOCK=block,
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        IN_PAIRS=layout != "halves", OF_HALVES=layout == "pairs of halves",
        DTYPE=tl.float32 if in_float else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[query.dtype],
        OVERLAP=overlap, num_warps=4, enable_fp_fusion=False, **options_of_launch(overlap),
    )  # fmt: skip
