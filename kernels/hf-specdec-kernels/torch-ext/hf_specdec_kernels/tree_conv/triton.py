"""The short convolution over a tree in Triton: a program for each row and block of channels."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, num_multiprocessors, options_of_launch
from ..pending import unit_stride


@triton.jit(do_not_specialize=["nodes", "width", "table_stride_b"])
def _tree_conv_kernel(
    x, weight, windows, pending, table, slots, path, counts, bias, out, nodes, width,
    x_stride_b, x_stride_n, weight_stride_c, weight_stride_k, pending_stride_b, table_stride_b,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, SCORE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Program (BLOCK_C channels, row): convolves the nodes, if SCORE, with the inputs that are committed or pending; then
    writes the window after the commit and, if SCORE, the nodes' inputs over those that were pending.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    wide_row = row.to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < CHANNELS
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.where(slot >= 0, tl.minimum(tl.load(counts + row).to(tl.int32), width), 0)
    count = tl.maximum(count, 0)
    path += wide_row * width
    at = tl.arange(0, BLOCK_N)
    is_node = at < nodes
    has_slot = at < tl.where(slot >= 0, nodes, 0)  # a row without a slot keeps nothing
    slot = tl.maximum(slot, 0)
    windows += (slot * CHANNELS + channels) * SIZE
    pending += slot * pending_stride_b
    node_inside = is_node[:, None] & inside[None, :]
    x += wide_row * x_stride_b
    x_offsets = at[:, None] * x_stride_n + channels[None, :]
    if SCORE:
        result = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        if BIAS:
            result += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            sources = tl.load(table + wide_row * table_stride_b + at * TAPS + tap, mask=is_node, other=0).to(tl.int32)
            taps_weight = tl.load(
                weight + channels * weight_stride_c + (TAPS - 1 - tap) * weight_stride_k, mask=inside, other=0.0
            )
            inputs = tl.load(
                x + sources.to(tl.int64)[:, None] * x_stride_n + channels[None, :],
                mask=node_inside & (sources >= 0)[:, None],
                other=0.0,
            ).to(tl.float32)
            if tap > 0:
                # Places among the inputs of the old window and then those of the path.
                places = SIZE + count + sources
                committed = has_slot & (sources < 0)
                in_window = committed & (places < SIZE)
                inputs += tl.load(
                    windows[None, :] + places[:, None], mask=in_window[:, None] & inside[None, :], other=0.0
                ).to(tl.float32)
                in_path = committed & (places >= SIZE)
                kept = tl.load(path + places - SIZE, mask=in_path, other=0).to(tl.int64)
                inputs += tl.load(
                    pending + kept[:, None] * CHANNELS + channels[None, :],
                    mask=in_path[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
            result += inputs * taps_weight.to(tl.float32)[None, :]
        if SILU:
            result /= 1.0 + tl.exp(-result)
        out_offsets = (wide_row * nodes + at)[:, None] * CHANNELS + channels[None, :]
        tl.store(
            out + out_offsets, tl.where(has_slot[:, None], result, 0.0).to(out.dtype.element_ty), mask=node_inside
        )
    columns = tl.arange(0, BLOCK_W)
    places = columns + count
    is_column = columns < tl.where(count > 0, SIZE, 0)
    in_window = is_column & (places < SIZE)
    in_path = is_column & (places >= SIZE)
    window = tl.load(windows[:, None] + places[None, :], mask=inside[:, None] & in_window[None, :], other=0.0)
    kept = tl.load(path + places - SIZE, mask=in_path, other=0).to(tl.int64)
    window += tl.load(
        pending + kept[None, :] * CHANNELS + channels[:, None], mask=inside[:, None] & in_path[None, :], other=0.0
    )
    tl.debug_barrier()  # all threads have read the old window and what is pending
    tl.store(windows[:, None] + columns[None, :], window, mask=inside[:, None] & is_column[None, :])
    if SCORE:
        own = tl.load(x + x_offsets, mask=node_inside, other=0.0)
        tl.store(pending + at[:, None] * CHANNELS + channels[None, :], own, mask=has_slot[:, None] & inside[None, :])


def launch_tree_conv(x, weight, windows, pending, table, slots, path, counts, bias, silu, out) -> None:
    """See `hf_specdec_kernels.tree_conv`."""
    x = unit_stride(x)
    _launch(x, weight, windows, pending, table.contiguous(), slots, path, counts, bias, silu, out)


def launch_commit_conv(windows, pending, slots, path, counts) -> None:
    """See `hf_specdec_kernels.commit_conv`."""
    _launch(None, None, windows, pending, None, slots, path, counts, None, False, None)


def _launch(x, weight, windows, pending, table, slots, path, counts, bias, silu, out) -> None:
    channels, size = windows.shape[1:]
    batch, score = len(slots), x is not None
    if batch == 0:
        return
    nodes = x.shape[1] if score else 1
    overlap = can_overlap(windows.device)
    block_c = channels_of_a_program(channels, batch, windows.device)
    launcher(_tree_conv_kernel, (triton.cdiv(channels, block_c), batch))(
        x if score else windows, weight if score else windows, windows, pending, table if score else counts,
        slots.contiguous(), path.contiguous(), counts.contiguous(), windows if bias is None else bias.contiguous(),
        out if score else windows, nodes, path.shape[1],
        *(x.stride()[:2] if score else (0, 0)), *(weight.stride() if score else (0, 0)), pending.stride(0),
        nodes * weight.shape[1] if score and len(table) > 1 else 0,
        CHANNELS=channels, TAPS=weight.shape[1] if score else 1, SIZE=size,
        BLOCK_N=triton.next_power_of_2(nodes), BLOCK_C=block_c,
        BLOCK_W=triton.next_power_of_2(max(size, 1)), BIAS=bias is not None, SILU=silu, SCORE=score, OVERLAP=overlap,
        num_warps=4, **options_of_launch(overlap),
    )  # fmt: skip


def channels_of_a_program(channels: int, rows: int, device) -> int:
    """128 channels, or 64 if there would be fewer programs than multiprocessors."""
    return 128 if rows * triton.cdiv(channels, 128) >= num_multiprocessors(device) else 64
