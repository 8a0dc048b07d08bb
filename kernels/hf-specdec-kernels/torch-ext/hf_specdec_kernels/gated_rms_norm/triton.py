"""RMSNorm with a gate in Triton: a program holds some rows of a group in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..compilation import launcher
from ..devices import can_overlap, is_interpreted, options_of_launch
from ..rms_norm.triton import NUMBERS


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_kernel(
    input, gate, weight, out, rows, input_stride, gate_stride, eps,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SCALING: tl.constexpr, ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
    LIBDEVICE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (rows, group): SIZE numbers of BLOCK_ROWS rows."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = tl.arange(0, BLOCK)
    of_weight = tl.program_id(1) * SIZE + place
    inside = (row < rows)[:, None] & (place < SIZE)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    row = row[:, None].to(tl.int64)
    states = tl.load(input + row * input_stride + of_weight[None, :], mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + of_weight[None, :], mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + of_weight, mask=place < SIZE, other=0.0).to(tl.float32)[None, :]
    above = gates if ACTIVATION == "silu" else tl.full([BLOCK_ROWS, BLOCK], 1.0, tl.float32)
    if LIBDEVICE:  # functions of CUDA's library, as in eager PyTorch: Triton's own are less exact
        gates = tl.div_rn(above, 1.0 + libdevice.exp(-gates))
    else:
        gates = above / (1.0 + tl.exp(-gates))
    if GATE_FIRST:
        states *= gates
    states *= tl.rsqrt(tl.sum(states * states, axis=1) * (1.0 / SIZE) + eps)[:, None]
    if SCALING == "rounded":
        states = (states.to(out.dtype.element_ty).to(tl.float32) * factors).to(out.dtype.element_ty).to(tl.float32)
    else:
        states *= factors
    if not GATE_FIRST:
        states *= gates
    tl.store(out + row * (SIZE * GROUPS) + of_weight[None, :], states.to(out.dtype.element_ty), inside)


def launch_gated_rms_norm(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int,
    scaling: str,
    activation: str,
    gate_first: bool,
    out: torch.Tensor,
) -> None:
    """See `hf_specdec_kernels.gated_rms_norm`; writes to contiguous `out`."""
    if not input.numel():
        return
    width = input.shape[-1]
    states, gates = (one.reshape(-1, width) for one in (input, gate))
    states, gates = (one if one.stride(1) == 1 else one.contiguous() for one in (states, gates))
    size = width // groups
    block = triton.next_power_of_2(size)
    block_rows = min(max(NUMBERS // block, 1), triton.next_power_of_2(len(states)))
    overlap = can_overlap(input.device)
    launcher(_gated_rms_norm_kernel, (triton.cdiv(len(states), block_rows), groups))(
        states, gates, weight.contiguous(), out, len(states), states.stride(0), gates.stride(0), eps,
        SIZE=size, GROUPS=groups, BLOCK_ROWS=block_rows, BLOCK=block,
        SCALING=scaling, ACTIVATION=activation, GATE_FIRST=gate_first,
        LIBDEVICE=not is_interpreted(), OVERLAP=overlap,
        num_warps=min(max(block * block_rows // 512, 1), 16),
        enable_fp_fusion=False,  # eager PyTorch rounds products before it adds them
        **options_of_launch(overlap),
    )  # fmt: skip
