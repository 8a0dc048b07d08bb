"""Growth of trees in plain Python and PyTorch."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import torch


def best_paths_naive(
    tokens: torch.Tensor, log_q: torch.Tensor, num_nodes: int, following: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_specdec_kernels.best_paths`."""
    batch, levels, ranks = len(log_q), log_q.shape[1], log_q.shape[-1]
    scores = log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf).view(batch, levels, -1, ranks).numpy()
    names = tokens.view(batch, levels, -1, ranks).numpy()
    lists = np.zeros_like(names) if following is None else following.view(batch, levels, -1, ranks).numpy()
    found = [_best_paths_of(*of_row, num_nodes) for of_row in zip(names, scores, lists, strict=True)]
    nodes, parents = ([part[at] for part in found] for at in (0, 1))
    return torch.tensor(nodes).to(tokens).view(batch, num_nodes), torch.tensor(parents).to(tokens).view(batch, -1)


def _best_paths_of(tokens: Any, log_q: Any, following: Any, num_nodes: int) -> tuple[list[int], list[int]]:
    """The nodes and parents of one row; the arguments are NumPy arrays `[levels, lists, ranks]`."""
    levels, _, ranks = log_q.shape
    impossible = np.float32(-np.inf)
    # An entry: minus its sum, its place among equals, level, list, rank, parent, sum up to the parent.
    heap = [(-log_q[0, 0, 0], 0, 0, 0, 0, 0, np.float32(0.0))]
    nodes, parents = [], [0]
    for node in range(1, num_nodes + 1):
        least, place, level, own, rank, parent, before = heapq.heappop(heap)
        entry = level, own, min(rank, ranks - 1)
        nodes.append(int(tokens[entry]))
        parents.append(parent)
        sibling = before + log_q[level, own, rank + 1] if rank + 1 < ranks else impossible
        below = int(following[entry])
        child = log_q[level + 1, below, 0] - least if level + 1 < levels else impossible
        heapq.heappush(heap, (-sibling, place, level, own, rank + 1, parent, before))
        heapq.heappush(heap, (-child, node, min(level + 1, levels - 1), below, 0, node, -least))
    return nodes, parents


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
