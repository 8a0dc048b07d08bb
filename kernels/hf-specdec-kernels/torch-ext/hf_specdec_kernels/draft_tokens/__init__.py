"""The tokens that a draft proposes as children of each node of a level."""

from __future__ import annotations

import torch

from .._ops import ops, register
from ..checks import check, check_dtype, check_shape
from .naive import draft_tokens_naive


__all__ = ["draft_tokens", "draft_tokens_naive"]

LARGEST_COUNT = 64


def draft_tokens(
    logits: torch.Tensor,
    count: int,
    *,
    temperature: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The `count` best tokens of q, the softmax of a draft's logits; or, with `noise`, `count` tokens drawn from q
    without replacement, in the order of the draws (Gumbel-top-k, arXiv 1903.06059).

    On CUDA nothing is sorted, no tensor as large as the logits is written, nothing is read on the host, and the launch
    depends on shapes only.

    Args:
        logits (`torch.Tensor` of shape `[batch, queries, vocab]`): the draft's logits, float32, float16 or bfloat16,
            -inf outside the support. The last stride is 1.
        count (`int`): number of tokens per query, at most 64.
        temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): positive divisor of the logits.
        noise (`torch.Tensor` of shape `[batch, queries, vocab]`, float32, *optional*): exponential random numbers, as
            `torch.empty_like(logits, dtype=torch.float32).exponential_()` draws them.
        out (`tuple`, *optional*): contiguous tensors for the two results.

    Returns:
        `tuple`: tokens `[batch, queries, count]` int64, the best (or first drawn) first, the lowest id first among
        equals, -1 after the last possible token; and their log-probabilities under q, `[batch, queries, count]`
        float32, -inf after the last possible token.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("logits", logits, None, None, None)
    check_dtype("logits", logits, (torch.bfloat16, torch.float16, torch.float32))
    batch, queries, vocab = logits.shape
    if not 0 < count <= min(LARGEST_COUNT, vocab):
        raise ValueError(f"`count` is {count}; it must be from 1 to {min(LARGEST_COUNT, vocab)}.")
    check("temperature", temperature, logits.device, (torch.float32,), batch)
    check("noise", noise, logits.device, (torch.float32,), batch, queries, vocab)
    for name, tensor in (("logits", logits), ("noise", noise)):
        if tensor is not None and vocab > 1 and tensor.stride(2) != 1:
            raise ValueError(
                f"`{name}` has strides {tensor.stride()}; the last must be 1: pass `{name}.contiguous()`."
            )
    shape = (batch, queries, count)
    if out is None:
        out = logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)
    for name, tensor, dtype in (("out[0]", out[0], torch.int64), ("out[1]", out[1], torch.float32)):
        check(name, tensor, logits.device, (dtype,), *shape)
        if not tensor.is_contiguous():
            raise ValueError(f"`{name}` has strides {tensor.stride()}; it must be contiguous.")
    ops.draft_tokens(logits, count, temperature, noise, *out)
    return out


register(draft_tokens_naive, results=("tokens", "log_probabilities"))
