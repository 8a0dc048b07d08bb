"""Growth of EAGLE-2's dynamic tree, from the draft's best tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ...kernels import DEVICES, kernels_are_installed
from ...trees import DraftTree, DynamicTree, Topology
from .best_tokens import BestTokens
from .nodes import LevelNodes


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
    from hf_specdec_kernels import ChosenNodes, choose_nodes
    from hf_specdec_kernels.tree_growth import choose_nodes_naive

    depth, top_k = min(tree.depth, depth), tree.top_k
    best, log_q = root
    device = best.device
    choose = choose_nodes if device.type in DEVICES and kernels_are_installed() else choose_nodes_naive
    depths, column_above = level_constants(depth, top_k, device)
    # Candidates of all levels: token and summed log-probability. Of every level, the numbers of those that have others
    # below them.
    tokens, sums = [best], [log_q]
    expanded = [torch.arange(top_k, device=device).expand(len(best), -1)]
    nodes, parents, path_log_q = best, torch.zeros_like(best), log_q
    ancestors = torch.eye(top_k, dtype=torch.bool, device=device).expand(len(best), -1, -1)
    first_of_level = top_k
    for level in range(1, depth):
        offset = (level - 1) * top_k
        best, log_q = expand(LevelNodes(nodes, parents, ancestors, depths[:, : offset + top_k], offset))
        tokens.append(best.flatten(1))
        if level == depth - 1:  # nothing is expanded below
            sums.append((path_log_q[:, :, None] + log_q).flatten(1))
            break
        chosen = ChosenNodes(*choose(best, log_q, path_log_q, ancestors, top_k))
        sums.append(chosen.sums)
        expanded.append(chosen.places + first_of_level)
        first_of_level += top_k**2
        nodes, parents, path_log_q, ancestors = chosen.tokens, chosen.parents, chosen.chosen_sums, chosen.ancestors
    above = torch.nn.functional.pad(torch.cat(expanded, dim=1), (1, 0), value=-1)
    above = above.index_select(1, column_above)
    return _best_candidates(torch.cat(tokens, 1), torch.cat(sums, 1), above, tree.num_nodes, depth)


@lru_cache(maxsize=64)
def level_constants(depth: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Index tensors of a dynamic tree, which a captured graph must hold: depths of all expanded nodes, `[1, depth *
    top_k]`, and for every candidate the column of the candidate above it, where column 0 is the root and the expanded
    ones of all levels follow, `[candidates]`, int64 both.
    """
    depths = torch.arange(depth, device=device).repeat_interleave(top_k)[None]
    columns = torch.arange(top_k + (depth - 1) * top_k**2, device=device) // top_k
    return depths, columns


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
