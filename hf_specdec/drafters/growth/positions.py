"""Growth of trees from logits that depend on the position alone: every node of a level has the same children."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...trees import DraftTree, DynamicTree, TokenTree, Topology
from .best_tokens import best_tokens
from .dynamic import grow_dynamic
from .nodes import LevelNodes


def grow_from_positions(tree: TokenTree | DynamicTree, logits: torch.Tensor, depth: int) -> DraftTree:
    """
    Fills a tree with the best tokens of each position; a child's rank is its token's rank among them. A dynamic tree
    whose `top_k` is at least its `num_nodes` has the best paths of all (DDTree, github.com/liranringel/ddtree).

    Args:
        logits (`torch.Tensor` of shape `[batch, positions, vocab]`): logits of the tokens 1, 2, … after the root.
        depth (`int`): levels that can be used.
    """
    if isinstance(tree, TokenTree):
        levels = [
            best_tokens(logits[:, position], most, with_log_q=False)[0][:, ranks]
            for position, (most, ranks) in enumerate(ranks_by_level(tree, logits.device))
        ]
        return DraftTree(torch.cat(levels, dim=1), Topology.of_tree(tree, logits.device))
    depth = min(tree.depth, depth)
    tokens, log_q = best_tokens(logits[:, :depth], tree.top_k)

    def expand(nodes: LevelNodes) -> tuple[torch.Tensor, torch.Tensor]:
        queries = nodes.tokens.shape[1]
        position = nodes.offset // queries + 1
        below = tokens[:, position, None], log_q[:, position, None]
        return below[0].expand(-1, queries, -1), below[1].expand(-1, queries, -1)

    return grow_dynamic(tree, (tokens[:, 0], log_q[:, 0]), expand, depth)


@lru_cache(maxsize=64)
def ranks_by_level(tree: TokenTree, device: torch.device) -> list[tuple[int, torch.Tensor]]:
    """For every level, how many of a position's best tokens it needs, and the ranks of its nodes, `[nodes]` int64."""
    offsets = zip(tree.level_offsets[1:], tree.level_offsets[2:], strict=False)
    levels = [tree.ranks[start:end] for start, end in offsets]
    return [(max(ranks) + 1, torch.tensor(ranks, device=device)) for ranks in levels]
