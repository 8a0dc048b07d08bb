"""Growth of a dynamic tree for sampling: how many children a node gets is decided before any of them is drawn."""

from __future__ import annotations

import torch

from ...trees import DraftTree, DynamicTree, Topology
from .drawing import draw_without_replacement
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
    rows = torch.arange(batch_size, device=device)[:, None]
    logits, left = root_logits[:, None], tree.num_nodes
    parents = torch.zeros(batch_size, 1, dtype=torch.long, device=device)  # node numbers of the forwarded nodes
    path_log_q = torch.zeros(batch_size, 1, device=device)
    parents_valid = torch.ones(batch_size, 1, dtype=torch.bool, device=device)
    ancestors, forwarded, num_forwarded, first_node = None, [], 0, 1
    tokens, valid, above, scores, depths = [], [], [], [], []
    for level in range(1, depth + 1):
        queries = parents.shape[1]
        children_each = min(top_k, logits.shape[-1])
        budget = min(-(-left // (depth - level + 1)), queries * children_each)
        scores.append(warp(logits))
        forwarded.append(parents)
        log_q = scores[-1].log_softmax(dim=-1)
        counts = _share_out(path_log_q[:, :, None] + log_q.topk(children_each, dim=-1).values, budget)
        own = None if noise is None else noise(level - 1, scores[-1])
        drawn, drawable = draw_without_replacement(scores[-1], children_each, own)
        wanted = torch.arange(children_each, device=device) < counts[:, :, None]
        places = (~wanted).flatten(1).sort(dim=1, stable=True).indices[:, :budget]
        parent = places // children_each
        tokens.append(drawn.flatten(1).gather(1, places))
        valid.append(drawable.flatten(1).gather(1, places) & parents_valid.gather(1, parent))
        above.append(parents.gather(1, parent))
        left -= budget
        if level == depth or left == 0:
            break
        path = path_log_q.gather(1, parent) + log_q[rows, parent, tokens[-1]]
        best = path.masked_fill(~valid[-1], -torch.inf).topk(min(top_k, budget), dim=1).indices.sort(dim=1).values
        path_log_q, parents_valid = path.gather(1, best), valid[-1].gather(1, best)
        parents = first_node + best
        first_node += budget
        places_above = parent.gather(1, best)
        if ancestors is None:
            ancestors = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        else:
            ancestors = attend_below(ancestors, places_above)
        depths.append(torch.full((1, best.shape[1]), level - 1, dtype=torch.long, device=device))
        node_depths = torch.cat(depths, dim=1)
        nodes = tokens[-1].gather(1, best)
        logits = run_level(LevelNodes(nodes, places_above, ancestors, node_depths, num_forwarded))
        num_forwarded += best.shape[1]
    parents_of_nodes = torch.nn.functional.pad(torch.cat(above, dim=1), (1, 0))
    return DraftTree(
        torch.cat(tokens, dim=1),
        Topology.of_parents(parents_of_nodes, len(tokens)),
        torch.cat(valid, dim=1),
        torch.cat(scores, dim=1),
        _index_of(torch.cat(forwarded, dim=1), parents_of_nodes.shape[1]),
    )


def _share_out(log_gains: torch.Tensor, budget: int) -> torch.Tensor:
    """
    Number of children per node, `[batch, queries]` int64, `budget` per row in all: each of the `budget` largest
    `log_gains` of a row (`[batch, queries, ranks]`, falling along the ranks) counts one for its node.
    """
    chosen = log_gains.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :budget]
    ones = torch.ones_like(chosen)
    return torch.zeros(log_gains.shape[:2], dtype=torch.long, device=chosen.device).scatter_add(
        1, chosen // log_gains.shape[2], ones
    )


def _index_of(forwarded: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Index of every row's nodes among the forwarded ones (`[batch, forwarded]`), or -1: `[batch, nodes]` int64."""
    places = torch.arange(forwarded.shape[1], device=forwarded.device).expand_as(forwarded)
    return torch.full((len(forwarded), num_nodes), -1, device=forwarded.device).scatter(1, forwarded, places)
