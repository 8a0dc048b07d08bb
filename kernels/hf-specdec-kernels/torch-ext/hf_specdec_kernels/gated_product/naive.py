"""The product of an activated gate and another vector, in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional


def gated_product_naive(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `hf_specdec_kernels.gated_product`."""
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up
