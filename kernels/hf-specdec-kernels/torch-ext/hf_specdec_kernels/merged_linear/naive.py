"""Linear layers that share an input, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


LARGEST_NUM_WEIGHTS = 3
"""Most weights of a call; the kernel has as many pointers."""


def merged_linear_naive(input: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See `hf_specdec_kernels.merged_linear`."""
    return [functional.linear(input, weight) for weight in weights]
