"""Nodes whose logits are processed: the tokens before them, and some of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...trees import Topology


class Places(NamedTuple):
    """
    Nodes whose logits are processed.

    Args:
        depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): their depths.
        paths (`torch.Tensor` of shape `[batch, nodes, depth]`, int64): the draft tokens from each of them up to the
            root, its own first; -1 after them.
    """

    depths: torch.Tensor
    paths: torch.Tensor

    @classmethod
    def of_tree(cls, topology: Topology, tokens: torch.Tensor) -> Places:
        """All nodes of a tree with these tokens, `[batch, nodes]`; -1 for nodes that no walk comes to."""
        depths, depth = topology.depths, topology.depth
        above = depths[:, :, None] - depths[:, None, 1:]
        above = torch.where(topology.ancestors[:, :, 1:], above, depth)
        drafted = tokens[:, None, 1:].expand(-1, tokens.shape[1], -1)
        paths = tokens.new_full((*tokens.shape, depth + 1), -1)
        paths.scatter_(2, above.expand_as(drafted), drafted)
        return cls(depths, paths[..., :depth])

    @classmethod
    def of_path(cls, new: torch.Tensor, level: int) -> Places:
        """The nodes of a level on the paths with the tokens `new`, `[batch, depth + 1]`."""
        return cls(torch.full_like(new[:, :1], level), new[:, None, :level].flip(2))

    def last_tokens(self, texts: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """
        The last `count` tokens of the texts that end with the nodes, the last one first, `[batch, nodes, count]`; -1
        before the beginning. `texts` (`[batch, most]`) are those of the rows, which count up to their `lengths`.
        """
        depths = self.depths[:, :, None]
        numbers = torch.arange(count, device=texts.device)
        places = lengths[:, None, None] - 1 + depths - numbers
        of_text = texts[:, None].expand(-1, places.shape[1], -1).gather(2, places.clamp(0, texts.shape[1] - 1))
        of_text = of_text.masked_fill(places < 0, -1)
        missing = max(0, count - self.paths.shape[2])
        of_path = torch.nn.functional.pad(self.paths[..., :count], (0, missing), value=-1)
        return torch.where(numbers < depths, of_path, of_text)


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
