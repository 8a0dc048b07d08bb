"""The product of an activated gate and another vector, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..compilation import launcher
from ..devices import can_overlap, is_interpreted, options_of_launch


BLOCK = 1024
"""Numbers of a program."""


@triton.jit
def _gated_product_kernel(
    gate, up, out, size, gate_stride, up_stride,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, LIBDEVICE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, block): BLOCK numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the kernel before
        tl.extra.cuda.gdc_launch_dependents()
    gates = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_stride + place, mask=inside, other=0.0).to(tl.float32)
    # Functions of CUDA's library, as in eager PyTorch: Triton's own are less exact.
    if ACTIVATION == "silu":
        if LIBDEVICE:
            gates = tl.div_rn(gates, 1.0 + libdevice.exp(-gates))
        else:
            gates = gates / (1.0 + tl.exp(-gates))
    else:
        # A product and a sum that CUDA's compiler has contracted in torch's kernel.
        inner = 0.7978845608028654 * tl.fma(gates * gates * gates, 0.044715, gates)
        if LIBDEVICE:
            gates = 0.5 * gates * (1.0 + libdevice.tanh(inner))
        else:
            gates = 0.5 * gates * (2.0 / (1.0 + tl.exp(-2.0 * inner)))
    gates = gates.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + place, (gates * ups).to(out.dtype.element_ty), mask=inside)


def launch_gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """See `hf_specdec_kernels.gated_product`; writes to contiguous `out`."""
    if not gate.numel():
        return
    size = gate.shape[-1]
    gates, ups = (one.reshape(-1, size) for one in (gate, up))
    gates, ups = (one if one.stride(1) == 1 else one.contiguous() for one in (gates, ups))
    block = min(BLOCK, triton.next_power_of_2(size))
    overlap = can_overlap(gate.device)
    launcher(_gated_product_kernel, (len(gates), triton.cdiv(size, block)))(
        gates, ups, out, size, gates.stride(0), ups.stride(0),
        BLOCK=block, ACTIVATION=activation, LIBDEVICE=not is_interpreted(), OVERLAP=overlap,
        num_warps=max(block // 256, 1), enable_fp_fusion=False, **options_of_launch(overlap),
    )  # fmt: skip
