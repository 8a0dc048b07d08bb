"""Steps of state layers: random trees, paths that are kept, and pending nodes in memory that was never written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specdec_kernels import DeltaPending, PendingPath, pack_ancestors, tree_ancestors


TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
OF_STATES = {torch.float32: 2e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}
"""Tolerances of outputs, and of states and pending updates, which are float32, by the dtype of activations."""
NUM_SLOTS = 5


class Tree:
    """A random tree for each of some rows; one of them for all, or a chain."""

    def __init__(self, rows: int, nodes: int, device: torch.device, chain: bool = False) -> None:
        places = torch.arange(nodes)
        random = (torch.rand(rows, nodes) * places).long().sort(dim=1).values
        self.parents = (places - 1).clamp(min=0).repeat(rows, 1) if chain else random
        self.depths, mask = tree_ancestors(self.parents, nodes)
        self.ancestors = pack_ancestors(mask).to(device)
        self.rows, self.nodes = rows, nodes

    def path(self, row: int, count: int) -> list[int]:
        """The first `count` nodes of the path to one of the deepest nodes, or fewer."""
        node, row = int(self.depths[row % self.rows].argmax()), row % self.rows
        path = [node]
        while node:
            node = int(self.parents[row, node])
            path.append(node)
        return path[::-1][:count]


def rows_of(
    tree: Tree | None, slots: Sequence[int], counts: Sequence[int], turns: torch.Tensor, width: int = 6
) -> PendingPath:
    """What is kept of a step with `tree`: `counts` nodes, or fewer. Other entries of the paths are no nodes."""
    path, device = torch.full((len(slots), width), 10**6), turns.device
    kept = [tree.path(row, min(count, width)) if tree else [] for row, count in enumerate(counts[: len(slots)])]
    for row, nodes in enumerate(kept):
        path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
    numbers = torch.tensor([len(nodes) for nodes in kept]).to(device)
    return PendingPath(torch.tensor(slots).to(device), turns, path.to(device), numbers)


def never_written(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def delta_pending(
    capacity: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    channels: bool = False,
) -> DeltaPending:
    """Pending nodes that were never written."""
    (heads, key_heads), (key_dim, value_dim) = heads, dims
    return DeltaPending(
        never_written(2, NUM_SLOTS, capacity, key_heads, key_dim, dtype=dtype, device=device),
        never_written(NUM_SLOTS, capacity, heads, value_dim, dtype=torch.float32, device=device),
        never_written(
            2, NUM_SLOTS, capacity, heads, *((key_dim,) if channels else ()), dtype=torch.float32, device=device
        ),
    )


def in_double(pending: tuple) -> list[torch.Tensor]:
    """Copies of tensors in float64, for the naive version."""
    return [tensor.double() for tensor in pending]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Compares with a tolerance that is relative to the largest number."""
    wanted, largest = wanted.double(), float(wanted.nan_to_num().abs().max())
    torch.testing.assert_close(
        found.double(), wanted, atol=tolerance * max(largest, 1e-3), rtol=tolerance, equal_nan=True
    )
