"""Growth of trees from logits that depend on the position alone: every node of a level has the same children."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from ...kernels import DEVICES, kernels_are_installed
from ...trees import DraftTree, DynamicTree, TokenTree, Topology
from .best_tokens import best_tokens


def grow_from_positions(tree: TokenTree | DynamicTree, logits: torch.Tensor, depth: int) -> DraftTree:
    """
    Fills a tree with the best tokens of each position; a child's rank is its token's rank among them. A dynamic tree
    holds the best paths of all, with up to `top_k` children for every node (DDTree, github.com/liranringel/ddtree).

    Args:
        logits (`torch.Tensor` of shape `[batch, positions, vocab]`): logits of the tokens 1, 2, … after the root.
        depth (`int`): levels that can be used.
    """
    if isinstance(tree, TokenTree):
        filled = [
            best_tokens(logits[:, position], most, with_log_q=False)[0][:, ranks]
            for position, (most, ranks) in enumerate(ranks_by_level(tree, logits.device))
        ]
        return DraftTree(torch.cat(filled, dim=1), Topology.of_tree(tree, logits.device))
    levels = min(tree.depth, depth)
    tokens, log_q = best_tokens(logits[:, :levels], tree.top_k)
    num_paths = sum(tree.top_k**level for level in range(1, levels + 1))
    nodes, parents = best_paths(tokens, log_q, min(tree.num_nodes, num_paths))
    return DraftTree(nodes, Topology.of_parents(parents, levels))


def best_paths(
    tokens: torch.Tensor, log_q: torch.Tensor, num_nodes: int, following: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.best_paths`."""
    from hf_specdec_kernels import best_paths as find

    if tokens.device.type in DEVICES and not kernels_are_installed():
        found = find(tokens.cpu(), log_q.cpu(), num_nodes, None if following is None else following.cpu())
        return found[0].to(tokens.device), found[1].to(tokens.device)
    return find(tokens, log_q, num_nodes, following)


@lru_cache(maxsize=64)
def ranks_by_level(tree: TokenTree, device: torch.device) -> list[tuple[int, torch.Tensor]]:
    """For every level, how many of a position's best tokens it needs, and the ranks of its nodes, `[nodes]` int64."""
    offsets = zip(tree.level_offsets[1:], tree.level_offsets[2:], strict=False)
    levels = [tree.ranks[start:end] for start, end in offsets]
    return [(max(ranks) + 1, torch.tensor(ranks, device=device)) for ranks in levels]


@lru_cache(maxsize=64)
def places_by_level(tree: TokenTree, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For every level, the places of its nodes' parents in the level above, and their ranks, `[nodes]` int64 each."""
    first, found = 0, []
    for start, end in pairwise(tree.level_offsets[1:]):
        places = [parent - first for parent in tree.parents[start:end]]
        found.append((torch.tensor(places, device=device), torch.tensor(tree.ranks[start:end], device=device)))
        first = start
    return found
