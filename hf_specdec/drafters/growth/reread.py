"""Levels that a draft reads again with every level below them, since nothing of them is committed in between."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...trees import DynamicTree, TokenTree
from .nodes import LevelNodes


class RereadNodes:
    """
    All nodes of a tree that were forwarded so far. A draft whose states lie at the committed tokens, and whose kernels
    take whole trees, runs them anew for each level: a forward of so few nodes takes as long as one of a level.

    Args:
        note_static (`Callable`, *optional*): told the ancestors of every level, if these are the same in every tree.
    """

    def __init__(self, note_static: Callable[[torch.Tensor], None] | None = None):
        self._note_static = note_static
        self._nodes: LevelNodes | None = None
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def with_level(self, nodes: LevelNodes) -> LevelNodes:
        """The nodes of the levels so far and of the next one, from the first node on."""
        before = None if nodes.offset == 0 else self._nodes
        if before is None:
            self._nodes = nodes
            self._note(nodes.ancestors)
            return nodes
        tokens = torch.cat([before.tokens, nodes.tokens], dim=1)
        ancestors = self._ancestors(before.ancestors, nodes)
        self._nodes = LevelNodes(tokens, nodes.parents, ancestors, nodes.node_depths, offset=0)
        return self._nodes

    def _ancestors(self, above: torch.Tensor, nodes: LevelNodes) -> torch.Tensor:
        """Ancestors of all nodes, `[1 or batch, nodes, nodes]`; the same tensor for a level of a static tree."""
        own, found = self._known.get(nodes.offset, (None, above))
        if own is not nodes.ancestors:
            own, above = nodes.ancestors, F.pad(above, (0, nodes.tokens.shape[1]))
            rows = max(len(above), len(own))
            found = torch.cat([above.expand(rows, -1, -1), own.expand(rows, -1, -1)], dim=1)
            self._known[nodes.offset] = own, found
            self._note(found)
        return found

    def _note(self, ancestors: torch.Tensor) -> None:
        if self._note_static is not None:
            self._note_static(ancestors)


def num_forwarded(tree: TokenTree | DynamicTree) -> int:
    """Number of a tree's nodes that a draft forwards, because they get children; the root is read before."""
    if isinstance(tree, DynamicTree):
        return (tree.depth - 1) * tree.top_k
    return sum(bool(children) for children in tree.children[1:])
