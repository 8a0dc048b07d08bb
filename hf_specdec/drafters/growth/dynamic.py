"""Growth of EAGLE-2's dynamic tree, from the draft's best tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...trees import DraftTree, DynamicTree, Topology
from .best_tokens import BestTokens
from .nodes import LevelNodes, attend_below


def grow_dynamic(
    tree: DynamicTree, root: BestTokens, expand: Callable[[LevelNodes], BestTokens], depth: int
) -> DraftTree:
    """
    EAGLE-2's dynamic tree (arXiv 2406.16858): at each level the best `top_k` nodes by summed log-probability are
    expanded by their `top_k` best tokens; the best `num_nodes` of all candidates stay, in level order.

    Args:
        root (`tuple`): the best tokens after the root, `[batch, top_k]`.
        expand (`Callable`): gives the best tokens after one level's nodes, `[batch, queries, top_k]`.
        depth (`int`): levels that can be used.
    """
    depth, top_k = min(tree.depth, depth), tree.top_k
    best, log_q = root
    batch_size, device = len(best), best.device
    # Candidates of all levels: token, summed log-probability, and the candidate above (-1: the root).
    tokens, sums = [best], [log_q]
    above = [torch.full_like(best, -1)]
    expanded = torch.arange(top_k, device=device).expand(batch_size, -1)  # numbers of the candidates to expand
    expanded_parents = torch.zeros_like(expanded)
    expanded_sums = log_q
    ancestors = torch.eye(top_k, dtype=torch.bool, device=device).expand(batch_size, -1, -1)
    first_of_level = top_k
    for level in range(1, depth):
        all_tokens = torch.cat(tokens, dim=1)
        node_depths = torch.arange(level, device=device).repeat_interleave(top_k)[None]
        nodes = all_tokens.gather(1, expanded)
        best, log_q = expand(LevelNodes(nodes, expanded_parents, ancestors, node_depths, (level - 1) * top_k))
        level_sums = (expanded_sums[:, :, None] + log_q).flatten(1)
        tokens.append(best.flatten(1))
        sums.append(level_sums)
        above.append(expanded.repeat_interleave(top_k, dim=1))
        chosen = level_sums.topk(top_k, dim=-1)
        expanded, expanded_sums = chosen.indices + first_of_level, chosen.values
        first_of_level += top_k**2
        expanded_parents = chosen.indices // top_k
        ancestors = attend_below(ancestors, expanded_parents)
    return _best_candidates(torch.cat(tokens, 1), torch.cat(sums, 1), torch.cat(above, 1), tree.num_nodes, depth)


def _best_candidates(
    tokens: torch.Tensor, sums: torch.Tensor, above: torch.Tensor, num_nodes: int, depth: int
) -> DraftTree:
    """The tree of the best `num_nodes` candidates; all arguments are `[batch, candidates]`, in level order."""
    # Sums fall along a path and ties keep their order, so that a chosen candidate's parent is chosen too.
    order = sums.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :num_nodes].sort(dim=1).values
    nodes = torch.zeros_like(above).scatter(
        1, chosen, torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen)
    )
    above = above.gather(1, chosen)
    parents = torch.where(above < 0, 0, nodes.gather(1, above.clamp(min=0)))
    parents = torch.nn.functional.pad(parents, (1, 0))
    return DraftTree(tokens.gather(1, chosen), Topology.of_parents(parents, depth))
