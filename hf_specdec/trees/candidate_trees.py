"""The trees among which `tree="auto"` chooses in captured steps."""

from __future__ import annotations

from functools import lru_cache

from .auto import AutoTree
from .auto_tables import AcceptanceTable, likeliest_paths
from .dynamic import DynamicTree
from .token_tree import TokenTree
from .whole_times import Tree, WholeTimes


class CandidateTrees:
    """
    The trees to choose among: the likeliest paths of some depth, for drafts with peaked, average and flat
    distributions. For texts and machines of any kind one of them is nearly as fast as the best static tree of all.
    A drafter's own tree is among them, and if that is dynamic a larger one: each row has other nodes there, which is
    worth most where rows share a step.

    Args:
        limits (`AutoTree`): largest size of a tree.
        times (`WholeTimes`, *optional*): times of steps with these trees. Once `WholeTimes.are_complete`, trees that
            were not timed are not worth a capture and are left out.
    """

    DRAFTS = (
        ((0.85, 0.06, 0.03, 0.02, 0.01), ((1, 1), (2, 2), (4, 4), (8, 8), (20, 8), (63, 7))),
        (AcceptanceTable.FIRST_GUESS, ((10, 2), (12, 5))),
        ((0.35, 0.15, 0.1, 0.07, 0.05), ((2, 1), (4, 2), (24, 3), (48, 3))),
    )
    """Acceptance probabilities by rank, and for each the nodes and levels of trees that are built for them."""
    DEEP = ((20, 8), (63, 7))
    """Sizes of trees in whose place dynamic ones stand."""
    MOST_NODES = 63
    """Most nodes of a tree: with the root as many as the kernels of recurrent layers take."""

    def __init__(self, limits: AutoTree, times: WholeTimes | None = None):
        trees = list(self._within(limits))
        if times is not None and times.are_complete:
            trees = [tree for tree in trees if times.has(tree)] or trees
        self.trees = trees

    @classmethod
    @lru_cache(maxsize=64)  # each call of `generate` asks
    def _within(cls, limits: AutoTree) -> tuple[Tree, ...]:
        """The trees, the smallest first."""
        found: dict[Tree, None] = dict.fromkeys(cls.dynamic_within(limits))
        left_out = cls.DEEP if found else ()
        if isinstance(limits.first, TokenTree) and limits.first.num_nodes <= min(limits.max_nodes, cls.MOST_NODES):
            found[limits.first] = None
        most_children, most_depth = limits.max_children, limits.max_depth
        for chances, sizes in cls.DRAFTS:
            table = [list(chances[:most_children])] * most_depth
            for nodes, levels in (size for size in sizes if size not in left_out):
                likeliest = likeliest_paths(table, min(nodes, limits.max_nodes), min(levels, most_depth))
                found[TokenTree([path for _, path in likeliest])] = None
        return tuple(sorted(found, key=size_of))

    @staticmethod
    def dynamic_within(limits: AutoTree) -> list[DynamicTree]:
        """The dynamic tree with which the drafter begins, if it has one, and one of about four times its nodes."""
        first, most = limits.first, min(limits.max_nodes, CandidateTrees.MOST_NODES)
        if not isinstance(first, DynamicTree) or first.num_nodes > CandidateTrees.MOST_NODES:
            return []
        depth = max(first.depth, min(first.depth + 2, limits.max_depth))
        top_k = max(first.top_k, min(2 * first.top_k, limits.max_children))
        num_nodes = min(4 * first.num_nodes, most, top_k + (depth - 1) * top_k**2)
        if num_nodes <= first.num_nodes:
            return [first]
        return [first, DynamicTree(depth=depth, top_k=top_k, num_nodes=num_nodes)]


def size_of(tree: Tree) -> tuple[int, int]:
    """Nodes and levels of a tree, by which trees are sorted."""
    return tree.num_nodes, tree.depth
