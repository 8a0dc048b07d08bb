"""Results of walks, and the state of a walk in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Walks(NamedTuple):
    """
    Results of the walks of all rows.

    Args:
        path (`torch.Tensor` of shape `[batch, max_depth + 1]`, int64): the accepted nodes, from the root (0) down;
            entry i after the last one is i, so that a gather with `path` is always valid.
        accepted (`torch.Tensor` of shape `[batch]`, int64): number of accepted nodes without the root; -1 for inactive
            rows.
        next_tokens (`torch.Tensor` of shape `[batch]`, int64): the bonus or recovered token; -1 if the last accepted
            token is an end token, and for inactive rows.
    """

    path: torch.Tensor
    accepted: torch.Tensor
    next_tokens: torch.Tensor


class WalkState:
    """
    State of the walks of all rows; the arguments are those of `hf_specdec_kernels.greedy_walk`.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        max_depth: int,
        end_tokens: torch.Tensor | None,
        active: torch.Tensor | None,
    ):
        batch, self.num_nodes = tokens.shape
        self.tokens, self.parents = tokens.long(), parents.long().expand(batch, -1)
        self.max_depth, self.end_tokens = max_depth, end_tokens
        self.rows = torch.arange(batch, device=tokens.device)
        self.node = torch.zeros_like(self.rows)
        self.path = torch.arange(max_depth + 1, device=tokens.device).repeat(batch, 1)
        self.walking = torch.ones_like(self.rows, dtype=torch.bool) if active is None else active.bool()
        self.accepted = torch.where(self.walking, 0, -1)
        self.next_tokens = torch.full_like(self.node, -1)

    def at_node(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (`[1 or batch, nodes, …]`) at the current node of each row's walk, `[batch, …]`."""
        return values.expand(len(self.rows), *values.shape[1:])[self.rows, self.node]

    def is_child(self, child: int) -> torch.Tensor:
        """Whether node `child` is a child of the row's current node, not void, within `max_depth`; `[batch]` bool."""
        within = self.accepted < self.max_depth
        return (self.parents[:, child] == self.node) & (self.tokens[:, child] >= 0) & within

    def choose(self, chosen: torch.Tensor) -> None:
        """Descends to the first child with the chosen token (`[batch]`), or ends the walk with that token."""
        accepted = torch.full_like(self.node, -1)
        for child in range(self.num_nodes - 1, 0, -1):
            accepted = torch.where(self.is_child(child) & (self.tokens[:, child] == chosen), child, accepted)
        self.step(accepted, chosen)

    def along(self, chosen: Callable[[], torch.Tensor]) -> Walks:
        """Walks all rows to their ends, along the tokens that `chosen` returns for their current nodes, `[batch]`."""
        while self.walking.any():
            self.choose(chosen())
        return self.result()

    def step(self, child: torch.Tensor, otherwise: torch.Tensor) -> None:
        """Descends to node `child` (`[batch]`), or where it is -1 ends the walk with token `otherwise` (`[batch]`)."""
        descends, ends = self.walking & (child >= 0), self.walking & (child < 0)
        self.next_tokens = torch.where(ends, otherwise, self.next_tokens)
        self.accepted = self.accepted + descends.long()
        place = self.accepted.clamp(min=0)[:, None]
        self.path = torch.where(descends[:, None], self.path.scatter(1, place, child[:, None]), self.path)
        self.node = torch.where(descends, child, self.node)
        self.walking = descends
        if self.end_tokens is not None:
            at_end = (self.at_node(self.tokens)[:, None] == self.end_tokens).any(dim=1)
            self.walking = descends & ~at_end

    def result(self) -> Walks:
        return Walks(self.path, self.accepted, self.next_tokens)
