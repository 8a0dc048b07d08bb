"""Rows that a recurrence follows at once: as many as there is memory for meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from .recurrence import Recurrence
from .topology import NodeTopology


MOST_BYTES = 1 << 28
"""Most bytes that a group takes meanwhile, unless a single row takes more: enough work for any device."""


def score_in_groups(
    recurrence: Recurrence,
    state: torch.Tensor,
    inputs: dict[str, Any],
    earlier: dict[str, torch.Tensor] | None,
    topology: NodeTopology,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`Recurrence.score`, for one group of rows after the other."""
    groups = _groups(recurrence, state, *topology.ancestors.shape[1:])
    if len(groups) == 1:
        return recurrence.score(state, inputs, earlier, topology)
    parts = []
    for rows in groups:
        before = None if earlier is None else {name: values[rows] for name, values in earlier.items()}
        ancestors = topology.ancestors if len(topology.ancestors) == 1 else topology.ancestors[rows]
        parts.append(recurrence.score(state[rows], _of(recurrence, inputs, rows), before, NodeTopology(ancestors)))
    outputs, kept = zip(*parts, strict=True)
    return torch.cat(outputs), {name: torch.cat([one[name] for one in kept]) for name in kept[0]}


def advance_in_groups(
    recurrence: Recurrence, state: torch.Tensor, kept: dict[str, Any], is_on: torch.Tensor
) -> torch.Tensor:
    """`Recurrence.advance`, for one group of rows after the other."""
    groups = _groups(recurrence, state, is_on.shape[1], is_on.shape[1])
    if len(groups) == 1:
        return recurrence.advance(state, kept, is_on)
    return torch.cat([recurrence.advance(state[rows], _of(recurrence, kept, rows), is_on[rows]) for rows in groups])


def _of(recurrence: Recurrence, values: dict[str, Any], rows: slice) -> dict[str, Any]:
    """What these rows have."""
    return {name: one if name in recurrence.constants else one[rows] for name, one in values.items()}


def _groups(recurrence: Recurrence, state: torch.Tensor, queries: int, nodes: int) -> list[slice]:
    size = rows_of_group(recurrence, tuple(state.shape[1:]), queries, nodes)
    return [slice(start, start + size) for start in range(0, len(state), size)]


def rows_of_group(recurrence: Recurrence, state: tuple[int, ...], queries: int, nodes: int) -> int:
    """Rows, with states of this shape, that are followed at once."""
    return max(MOST_BYTES // max(recurrence.transient_bytes(state, queries, nodes), 1), 1)


def most_bytes(recurrence: Recurrence, state: tuple[int, ...], rows: int, nodes: int) -> int:
    """Bytes that a forward of so many rows and nodes takes meanwhile."""
    return min(rows, rows_of_group(recurrence, state, nodes, nodes)) * recurrence.transient_bytes(state, nodes, nodes)


def most_bytes_of_reading(recurrence: Recurrence, state: tuple[int, ...], rows: int, tokens: int) -> int:
    """Bytes that texts of so many rows take meanwhile, of so many tokens all together, where they are read at once."""
    per_token = recurrence.bytes_of_reading(state)
    return min(tokens * per_token, max(MOST_BYTES, rows * recurrence.block_at_once * per_token))
