"""Processing of some nodes at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch


MOST_SCORES = 2**24
"""Most scores that plain PyTorch processes in one go: its memory is some times as much in float32."""


def by_nodes(
    function: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    *beside: torch.Tensor,
    dtype: torch.dtype | None = None,
    width: int = 0,
) -> torch.Tensor:
    """
    What a function makes of logits `[batch, nodes, vocab]`, of some nodes at a time.

    Args:
        function (`Callable`): takes logits, and what belongs to them of `beside`.
        beside (`torch.Tensor` of shape `[batch, nodes, …]`): other arguments.
        dtype (`torch.dtype`, *optional*): of what it makes; by default that of the logits.
        width (`int`): number of values per node with which it works, if more than the vocabulary.
    """
    batch, nodes, vocab = logits.shape
    found, step = torch.empty_like(logits, dtype=dtype), max(1, MOST_SCORES // (batch * max(vocab, width)))
    for first in range(0, nodes, step):
        part = slice(first, first + step)
        found[:, part] = function(logits[:, part], *(one[:, part] for one in beside))
    return found
