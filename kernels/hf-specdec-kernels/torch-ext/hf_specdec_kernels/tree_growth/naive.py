"""Growth of trees in plain Python and PyTorch."""

from __future__ import annotations

import heapq

import numpy as np
import torch


def best_paths_naive(tokens: torch.Tensor, log_q: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.best_paths`."""
    levels, ranks = log_q.shape[1:]
    all_nodes, all_parents = [], []
    for own, scores in zip(tokens.tolist(), log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf).numpy(), strict=True):
        # An entry: minus its sum, its place among equals, level, rank, parent, sum up to the parent.
        heap = [(-scores[0, 0], 0, 0, 0, 0, np.float32(0.0))]
        nodes, parents = [], [0]
        for node in range(1, num_nodes + 1):
            least, place, level, rank, parent, before = heapq.heappop(heap)
            nodes.append(own[level][min(rank, ranks - 1)])
            parents.append(parent)
            sibling = before + scores[level, rank + 1] if rank + 1 < ranks else np.float32(-np.inf)
            child = scores[level + 1, 0] - least if level + 1 < levels else np.float32(-np.inf)
            heapq.heappush(heap, (-sibling, place, level, rank + 1, parent, before))
            heapq.heappush(heap, (-child, node, min(level + 1, levels - 1), 0, node, -least))
        all_nodes.append(nodes)
        all_parents.append(parents)
    return torch.tensor(all_nodes).to(tokens), torch.tensor(all_parents).to(tokens)


def choose_nodes_naive(
    tokens: torch.Tensor, log_q: torch.Tensor, path_log_q: torch.Tensor, ancestors: torch.Tensor, count: int
) -> tuple[torch.Tensor, ...]:
    """See `hf_specdec_kernels.choose_nodes`; returns the fields of `ChosenNodes`."""
    sums = (path_log_q[:, :, None] + log_q).flatten(1)
    order = sums.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    places = order.sort(dim=1, descending=True, stable=True).indices[:, :count]
    parents = places // log_q.shape[2]
    inherited = ancestors.gather(1, parents[:, :, None].expand(-1, -1, ancestors.shape[2]))
    own = torch.eye(count, dtype=torch.bool, device=sums.device).expand(len(sums), -1, -1)
    below = torch.cat([inherited, own], dim=2)
    return sums, places, sums.gather(1, places), tokens.flatten(1).gather(1, places), parents, below


def tree_ancestors_naive(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.tree_ancestors`."""
    rows, nodes = parents.shape
    ancestors = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    depths = torch.zeros_like(parents)
    above = torch.arange(nodes, device=parents.device).expand(rows, -1)
    for _ in range(depth):
        depths += above != 0
        above = parents.gather(1, above)
        ancestors.scatter_(2, above[:, :, None], True)
    return depths, ancestors
