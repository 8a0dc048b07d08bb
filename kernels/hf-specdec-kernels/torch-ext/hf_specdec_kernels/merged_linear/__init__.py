"""Linear layers that share an input, such as the projections to queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ops import add_op_namespace_prefix, ops
from ..checks import check, check_dtype
from ..compilation import operators_are_resting
from .naive import LARGEST_NUM_WEIGHTS, merged_linear_naive


__all__ = ["LARGEST_NUM_WEIGHTS", "merged_linear", "merged_linear_naive", "operator"]


def merged_linear(input: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """
    The products of one input with several weights, `input @ weight.T` each. On CUDA, few rows are multiplied with all
    weights by one launch, which reads each weight where it lies: small weights read one after the other leave the
    memory idle between two launches. Products are accumulated in float32 and rounded once.

    Args:
        input (`torch.Tensor` of shape `[…, in_features]`): float32, float16 or bfloat16.
        weights (`list[torch.Tensor]` of shapes `[out_features, in_features]`): one to three, of the input's dtype, as
            `torch.nn.Linear` holds them.

    Returns:
        `list[torch.Tensor]`: the products, `[…, out_features]` each, of the input's dtype, contiguous.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    if not 1 <= len(weights) <= LARGEST_NUM_WEIGHTS:
        raise ValueError(f"`weights` has {len(weights)} tensors; pass 1 to {LARGEST_NUM_WEIGHTS}.")
    if input.dim() == 0:
        raise ValueError("`input` has no dimensions; it must be [..., in_features].")
    floats = (torch.bfloat16, torch.float16, torch.float32) + ((torch.float64,) if input.device.type == "cpu" else ())
    check_dtype("input", input, floats)
    for number, weight in enumerate(weights):
        check(f"weights[{number}]", weight, input.device, (input.dtype,), None, input.shape[-1])
    return ops.merged_linear(input, list(weights))


@torch.library.custom_op(add_op_namespace_prefix("merged_linear"), mutates_args=(), device_types="cpu")
def _merged_linear(input: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    if operators_are_resting():
        return [input.new_zeros(*input.shape[:-1], weight.shape[0]) for weight in weights]
    return merged_linear_naive(input, weights)


@_merged_linear.register_kernel("cuda")
def _(input: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    from .triton import launch_merged_linear, suits  # triton is only needed where it runs

    if not suits(input, weights):
        return merged_linear_naive(input, weights)
    out = [input.new_empty(*input.shape[:-1], weight.shape[0]) for weight in weights]
    if operators_are_resting():
        torch._foreach_zero_(out)
    with torch.cuda.device_of(input):  # Triton launches on the current device
        launch_merged_linear(input, weights, out)
    return out


@_merged_linear.register_fake
def _(input: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [input.new_empty(*input.shape[:-1], weight.shape[0]) for weight in weights]


operator = ops.merged_linear.default
"""The operator behind `merged_linear`, for passes over graphs. It does not check its arguments."""
