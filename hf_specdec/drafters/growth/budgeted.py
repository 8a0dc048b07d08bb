"""Growth of a dynamic tree for sampling: how many children a node gets is decided before any of them is drawn."""

from __future__ import annotations

import torch

from ...trees import DraftTree, DynamicTree, Topology
from .drawing import Draws
from .nodes import LevelNodes, Noise, RunLevel, Warp, attend_below


def grow_budgeted(
    tree: DynamicTree,
    root_logits: torch.Tensor,
    run_level: RunLevel,
    warp: Warp,
    depth: int,
    noise: Noise | None = None,
) -> DraftTree:
    """
    Grows a dynamic tree for sampling. Before any child of a level is drawn, the level's nodes are shared out among the
    (at most `top_k`) most probable nodes above: the most probable (node, rank) pairs by q get one child each. All
    children drawn within these budgets are kept.
    """
    depth, top_k = min(tree.depth, depth), tree.top_k
    batch_size, device = len(root_logits), root_logits.device
    logits, left = root_logits[:, None], tree.num_nodes
    parents = torch.zeros(batch_size, 1, dtype=torch.long, device=device)  # node numbers of the forwarded nodes
    path_log_q = torch.zeros(batch_size, 1, device=device)
    parents_valid = torch.ones(batch_size, 1, dtype=torch.bool, device=device)
    ancestors, forwarded, num_forwarded, first_node = None, [], 0, 1
    tokens, valid, above, depths = [], [], [], []
    draws = Draws(warp, root_logits, noise)
    for level in range(1, depth + 1):
        children_each = min(top_k, logits.shape[-1])
        budget = min(-(-left // (depth - level + 1)), parents.shape[1] * children_each)
        drawn, num_chosen = draws.draw(logits, children_each, with_best=True), min(top_k, budget)
        found = draws.share_out(
            parents, path_log_q, parents_valid, drawn.best, drawn.tokens, drawn.log_q, budget, num_chosen, first_node
        )
        forwarded.append(parents)
        tokens.append(found.tokens)
        valid.append(found.valid)
        above.append(found.parents)
        left -= budget
        if level == depth or left == 0:
            break
        parents, path_log_q, parents_valid = found.chosen, found.path_log_q, found.chosen_valid
        first_node += budget
        if ancestors is None:
            ancestors = torch.eye(num_chosen, dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        else:
            ancestors = attend_below(ancestors, found.chosen_above)
        depths.append(torch.full((1, num_chosen), level - 1, dtype=torch.long, device=device))
        node_depths = torch.cat(depths, dim=1)
        logits = run_level(LevelNodes(found.chosen_tokens, found.chosen_above, ancestors, node_depths, num_forwarded))
        num_forwarded += num_chosen
    parents_of_nodes = torch.nn.functional.pad(torch.cat(above, dim=1), (1, 0))
    return DraftTree(
        torch.cat(tokens, dim=1),
        Topology.of_parents(parents_of_nodes, len(tokens)),
        torch.cat(valid, dim=1),
        score_index=_index_of(torch.cat(forwarded, dim=1), parents_of_nodes.shape[1]),
        **draws.of_tree(),
    )


def _index_of(forwarded: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Index of every row's nodes among the forwarded ones (`[batch, forwarded]`), or -1: `[batch, nodes]` int64."""
    places = torch.arange(forwarded.shape[1], device=forwarded.device).expand_as(forwarded)
    return torch.full((len(forwarded), num_nodes), -1, device=forwarded.device).scatter(1, forwarded, places)
