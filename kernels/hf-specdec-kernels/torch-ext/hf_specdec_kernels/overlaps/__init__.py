"""How much of the target's distribution p a draft's q covers, at several temperatures of q."""

from __future__ import annotations

import torch

from .._ops import ops, register
from ..checks import INTEGERS, check, check_shape
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
    check("grid", grid, logits.device, (torch.float32,), None)
    columns = vocab if vocabulary is None else len(vocabulary)
    for name, tensor, size in (("logits", logits, vocab), ("draft_logits", draft_logits, columns)):
        check(name, tensor, logits.device, FLOATS, batch, size)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"`{name}` has strides {tensor.stride()}; the last must be 1: pass `{name}.contiguous()`."
            )
    check("vocabulary", vocabulary, logits.device, INTEGERS, None)
    check("temperature", temperature, logits.device, (torch.float32,), batch)
    check("draft_temperature", draft_temperature, logits.device, (torch.float32,), batch)
    found = logits.new_empty(batch, len(grid), dtype=torch.float32)
    ops.draft_overlaps(logits, draft_logits, grid, temperature, draft_temperature, vocabulary, found)
    return found


register(draft_overlaps_naive, results=("overlaps",))
