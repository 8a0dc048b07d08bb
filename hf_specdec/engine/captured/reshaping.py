"""What a captured step reports of trees whose shape it has chosen: what was offered on the accepted path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...trees.confidence import RowOutcome


_UNIT = 2**30
"""Factor by which chances are scaled to integers for a report."""


def num_columns(depth: int, has_confidence: bool) -> int:
    """Columns of `offered_columns`, and of the draft's estimates before them if there are any."""
    return 2 * depth + 1 + (depth if has_confidence else 0)


def confidence_columns(confidences: torch.Tensor) -> torch.Tensor:
    """The draft's estimates, `[rows, depth]`, as columns of a report."""
    return (confidences * _UNIT).long()


def offered_columns(path: torch.Tensor, parents: torch.Tensor, usable: torch.Tensor) -> torch.Tensor:
    """
    Columns of a report, `[rows, 2 * depth + 1]` int64: the number of children of the root and of every accepted node,
    then the rank of every accepted node, which is the number of its parent's children before it.

    Args:
        path (`torch.Tensor` of shape `[rows, depth + 1]`, int64): the root and the accepted nodes, padded.
        parents, usable (`torch.Tensor` of shape `[rows, nodes + 1]`): parents of all nodes, and which nodes count.
    """
    children = (parents[:, None, 1:] == path[:, :, None]) & usable[:, None, 1:]
    numbers = torch.arange(1, parents.shape[1], device=path.device)
    before = children[:, :-1] & (numbers < path[:, 1:, None])
    return torch.cat([children.sum(dim=2), before.sum(dim=2)], dim=1)


def read_row_outcome(columns: Sequence[int], depth: int, accepted: int, has_confidence: bool) -> RowOutcome:
    """What the columns of a row say."""
    chances = [chance / _UNIT for chance in columns[:depth]] if has_confidence else []
    offered, ranks = columns[len(chances) :][: depth + 1], columns[len(chances) + depth + 1 :]
    return RowOutcome(chances, list(offered[: accepted + 1]), list(ranks[:accepted]))
