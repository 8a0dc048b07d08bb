"""The nodes of a level that a draft model forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, eq=False)
class LevelNodes:
    """
    Nodes of one level that are forwarded because they get children.

    Args:
        tokens (`torch.Tensor` of shape `[batch, queries]`, int64): the nodes' tokens.
        parents (`torch.Tensor` of shape `[1 or batch, queries]`, int64): for each node, the index of its parent among
            the nodes forwarded in the level above; 0 for the root's children.
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, nodes]`, bool): which of all nodes forwarded so far
            (the queries last) each query attends to, besides the committed tokens.
        node_depths (`torch.Tensor` of shape `[1, nodes]`, int64): depths of all nodes forwarded so far, from 0 for the
            root's children.
        offset (`int`): number of nodes forwarded in earlier levels.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    node_depths: torch.Tensor
    offset: int


RunLevel = Callable[[LevelNodes], torch.Tensor]
Warp = Callable[[torch.Tensor], torch.Tensor]
Noise = Callable[[int, torch.Tensor], torch.Tensor]
"""
Gives minus the Gumbel noise by which a level's children are drawn, `[batch, 1, vocab]`, for the level (from 0) and the
scores `[batch, queries, vocab]`; see `PositionNoise`.
"""


class TokenLimits(Protocol):
    """Says which tokens may come in a tree, level by level as it grows. Hidden ones have -inf."""

    def at_root(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits at the root, `[batch, vocab]`."""

    def below(self, nodes: LevelNodes, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits at the next level's nodes, `[batch, queries, vocab]`."""


def attend_below(ancestors: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """
    Ancestor mask of the next level's nodes, `[batch, queries, nodes + queries]`: they attend to what their parents
    attend to, and to themselves. `parents` (`[batch, queries]`) are indices in the level above, `ancestors`
    (`[batch, queries above, nodes]`) is the mask of that level.
    """
    inherited = ancestors.gather(1, parents[:, :, None].expand(-1, -1, ancestors.shape[2]))
    own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    return torch.cat([inherited, own], dim=2)
