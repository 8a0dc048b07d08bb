"""Levels that a draft reads again with every level below them, since nothing of them is committed in between."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...trees import DynamicTree, TokenTree
from .nodes import LevelNodes


class RereadNodes:
    """
    All nodes of a tree that were forwarded so far. A draft whose states lie at the committed tokens, and whose kernels
    take whole trees, runs them anew for each level: a forward of so few nodes takes as long as one of a level.
    """

    def __init__(self) -> None:
        self._nodes: LevelNodes | None = None

    def with_level(self, nodes: LevelNodes) -> LevelNodes:
        """The nodes of the levels so far and of the next one, from the first node on."""
        before = None if nodes.offset == 0 else self._nodes
        if before is None:
            self._nodes = nodes
            return nodes
        queries = nodes.tokens.shape[1]
        above, own = F.pad(before.ancestors, (0, queries)), nodes.ancestors
        rows = max(len(above), len(own))
        self._nodes = LevelNodes(
            torch.cat([before.tokens, nodes.tokens], dim=1),
            nodes.parents,
            torch.cat([above.expand(rows, -1, -1), own.expand(rows, -1, -1)], dim=1),
            nodes.node_depths,
            offset=0,
        )
        return self._nodes


def num_forwarded(tree: TokenTree | DynamicTree) -> int:
    """Number of a tree's nodes that a draft forwards, because they get children; the root is read before."""
    if isinstance(tree, DynamicTree):
        return (tree.depth - 1) * tree.top_k
    return sum(bool(children) for children in tree.children[1:])
