"""RMSNorm in Triton: a program holds some rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compilation import launcher
from ..devices import can_overlap, options_of_launch


NUMBERS = 1024
"""Numbers of a program, unless a row has more."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    input, weight, out, rows, input_stride, eps,
    SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SCALING: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (rows): BLOCK_ROWS rows of SIZE numbers."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (place < SIZE)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    rows_of_input = row[:, None].to(tl.int64) * input_stride
    states = tl.load(input + rows_of_input + place[None, :], mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + place, mask=place < SIZE, other=0.0).to(tl.float32)[None, :]
    states *= tl.rsqrt(tl.sum(states * states, axis=1) * (1.0 / SIZE) + eps)[:, None]
    if SCALING == "rounded":
        states = states.to(out.dtype.element_ty).to(tl.float32)
    if SCALING == "offset":
        factors = 1.0 + factors
    tl.store(
        out + row[:, None].to(tl.int64) * SIZE + place[None, :], (states * factors).to(out.dtype.element_ty), inside
    )


def launch_rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str, out: torch.Tensor) -> None:
    """See `hf_specdec_kernels.rms_norm`; writes to contiguous `out`."""
    if not input.numel():
        return
    size = input.shape[-1]
    flat = input.reshape(-1, size)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    block = triton.next_power_of_2(size)
    block_rows = min(max(NUMBERS // block, 1), triton.next_power_of_2(len(flat)))
    overlap = can_overlap(input.device)
    launcher(_rms_norm_kernel, (triton.cdiv(len(flat), block_rows),))(
        flat, weight.contiguous(), out, len(flat), flat.stride(0), eps,
        SIZE=size, BLOCK_ROWS=block_rows, BLOCK=block, SCALING=scaling, OVERLAP=overlap,
        num_warps=min(max(block * block_rows // 512, 1), 16),
        enable_fp_fusion=False,  # eager PyTorch rounds products before it adds them
        **options_of_launch(overlap),
    )  # fmt: skip
