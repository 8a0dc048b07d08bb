"""The short convolution over a tree in plain PyTorch, input by input."""

from __future__ import annotations

import torch


def tree_conv_naive(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    pending: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """See `hf_specdec_kernels.tree_conv`; computes in float32, or float64 if `x` is, and reads values on the host."""
    commit_conv_naive(windows, pending, slots, path, counts)
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps, size = weight.shape[1], windows.shape[2]
    out = torch.zeros_like(x, dtype=dtype)
    for row, (slot, nodes) in enumerate(zip(slots.tolist(), table.expand(len(x), -1, -1).tolist(), strict=True)):
        if slot < 0:
            continue
        for node, places in enumerate(nodes):
            for tap, place in enumerate(places):
                source = x[row, place] if place >= 0 else windows[slot, :, size + place]
                out[row, node] += weight[:, taps - 1 - tap].to(dtype) * source.to(dtype)
            pending[slot, node] = x[row, node]
        out[row] += 0 if bias is None else bias.to(dtype)
    return torch.nn.functional.silu(out) if silu else out


def commit_conv_naive(
    windows: torch.Tensor, pending: torch.Tensor, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor
) -> None:
    """See `hf_specdec_kernels.commit_conv`."""
    for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        if slot >= 0:
            for node in path[row, : max(count, 0)].tolist():
                windows[slot] = torch.cat([windows[slot, :, 1:], pending[slot, node, :, None]], dim=1)
