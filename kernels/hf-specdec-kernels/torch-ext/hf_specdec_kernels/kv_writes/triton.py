"""Writes of keys and values into blocks in Triton: a program writes some heads of one node."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, options_of_launch


NUMBERS = 1024
"""Numbers of the keys of a program, about."""


@triton.jit
def _copy(states, cache, head, heads, states_stride, cache_stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (place < DIM)[None, :]
    head = head.to(tl.int64)
    numbers = tl.load(states + head[:, None] * states_stride + place[None, :], mask=inside)
    tl.store(cache + head[:, None] * cache_stride + place[None, :], numbers, mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def _write_kv_kernel(
    keys, values, key_states, value_states, blocks, offsets, nodes, heads,
    keys_b, keys_h, keys_s, values_b, values_h, values_s,
    key_states_b, key_states_h, key_states_n, value_states_b, value_states_h, value_states_n,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (node, tile): BLOCK_HEADS heads of a node of a row."""
    place = tl.program_id(0).to(tl.int64)
    row, node = place // nodes, place % nodes
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    block, offset = tl.load(blocks + place), tl.load(offsets + place)
    _copy(
        key_states + row * key_states_b + node * key_states_n, keys + block * keys_b + offset * keys_s,
        head, heads, key_states_h, keys_h, KEY_DIM, BLOCK_KEY,
    )  # fmt: skip
    _copy(
        value_states + row * value_states_b + node * value_states_n, values + block * values_b + offset * values_s,
        head, heads, value_states_h, values_h, VALUE_DIM, BLOCK_VALUE,
    )  # fmt: skip


def launch_write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """See `hf_specdec_kernels.write_kv`; the last stride of caches is 1."""
    if not blocks.numel():
        return
    states = [one if one.stride(3) == 1 else one.contiguous() for one in (key_states, value_states)]
    heads, nodes = key_states.shape[1:3]
    strides = [one.stride(dim) for one in (keys, values, *states) for dim in range(3)]
    sizes = [max(one.shape[3], 1) for one in states]
    block_key, block_value = map(triton.next_power_of_2, sizes)
    block_heads = min(max(NUMBERS // max(block_key, block_value), 1), triton.next_power_of_2(heads))
    overlap = can_overlap(keys.device)
    launcher(_write_kv_kernel, (blocks.numel(), triton.cdiv(heads, block_heads)))(
        keys, values, *states, blocks.contiguous(), offsets.contiguous(), nodes, heads, *strides,
        KEY_DIM=states[0].shape[3], VALUE_DIM=states[1].shape[3], BLOCK_HEADS=block_heads,
        BLOCK_KEY=block_key, BLOCK_VALUE=block_value, OVERLAP=overlap,
        num_warps=4, **options_of_launch(overlap),
    )  # fmt: skip
