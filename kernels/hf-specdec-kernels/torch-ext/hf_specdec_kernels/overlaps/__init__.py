"""How much of the target's distribution p a draft's q covers, at several temperatures of q."""

from __future__ import annotations

import torch

from .._ops import add_op_namespace_prefix, ops
from ..checks import INTEGERS, check_device, check_dtype, check_shape
from .naive import draft_overlaps_naive


__all__ = ["draft_overlaps", "draft_overlaps_naive"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def draft_overlaps(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    grid: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    draft_temperature: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Σ min(p, q) at one node of every row: the probability that a token drawn from q is accepted (arXiv 2211.17192), for
    q at each temperature of a grid.

    On CUDA this is one launch, which writes nothing as large as the logits.

    Args:
        logits (`torch.Tensor` of shape `[batch, vocab]`): the target's logits, float32, float16 or bfloat16. The last
            stride is 1.
        draft_logits (`torch.Tensor` of shape `[batch, vocab or draft vocab]`): the draft's logits, as `logits`.
        grid (`torch.Tensor` of shape `[temperatures]`, float32): positive temperatures of q.
        temperature, draft_temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): positive divisors of
            the logits and of the draft's logits, which the temperatures of the grid divide again.
        vocabulary (`torch.Tensor` of shape `[draft vocab]`, int32 or int64, *optional*): for a smaller draft
            vocabulary, the target's token of every column.

    Returns:
        `torch.Tensor`: `[batch, temperatures]` float32. NaN where p or q has no softmax.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("logits", logits, None, None)
    batch, vocab = logits.shape
    check_shape("draft_logits", draft_logits, batch, vocab if vocabulary is None else len(vocabulary))
    check_shape("grid", grid, None)
    check_dtype("grid", grid, (torch.float32,))
    for name, tensor in (("logits", logits), ("draft_logits", draft_logits)):
        check_dtype(name, tensor, FLOATS)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"`{name}` has strides {tensor.stride()}; the last must be 1: pass `{name}.contiguous()`."
            )
    if vocabulary is not None:
        check_shape("vocabulary", vocabulary, None)
        check_dtype("vocabulary", vocabulary, INTEGERS)
    per_row = {"temperature": temperature, "draft_temperature": draft_temperature}
    for name, values in per_row.items():
        if values is not None:
            check_shape(name, values, batch)
            check_dtype(name, values, (torch.float32,))
    for name, values in (per_row | {"draft_logits": draft_logits, "grid": grid, "vocabulary": vocabulary}).items():
        if values is not None:
            check_device(name, values, logits.device)
    found = logits.new_empty(batch, len(grid), dtype=torch.float32)
    ops.draft_overlaps(logits, draft_logits, grid, temperature, draft_temperature, vocabulary, found)
    return found


@torch.library.custom_op(add_op_namespace_prefix("draft_overlaps"), mutates_args=("overlaps",), device_types="cpu")
def _draft_overlaps(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    grid: torch.Tensor,
    temperature: torch.Tensor | None,
    draft_temperature: torch.Tensor | None,
    vocabulary: torch.Tensor | None,
    overlaps: torch.Tensor,
) -> None:
    overlaps.copy_(draft_overlaps_naive(logits, draft_logits, grid, temperature, draft_temperature, vocabulary))


@_draft_overlaps.register_kernel("cuda")
def _(*args) -> None:
    from .triton import launch_draft_overlaps  # triton is only needed where it runs

    with torch.cuda.device_of(args[0]):  # Triton launches on the current device
        launch_draft_overlaps(*args)


_draft_overlaps.register_fake(lambda *args: None)
