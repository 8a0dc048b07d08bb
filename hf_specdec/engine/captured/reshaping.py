"""What a captured step reports of trees that it has shaped by what the draft told of its acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...trees.told import Told


_UNIT = 2**30
"""Factor by which chances are scaled to integers for a report."""


def num_columns(depth: int) -> int:
    """Columns of `told_columns`."""
    return 3 * depth + 2


def told_columns(
    told: torch.Tensor, ranks: torch.Tensor, path: torch.Tensor, parents: torch.Tensor, usable: torch.Tensor
) -> torch.Tensor:
    """
    Columns of a report, `[rows, 3 * depth + 2]` int64; see `Told`.

    Args:
        told (`torch.Tensor` of shape `[rows, depth]`): the draft's estimates.
        ranks (`torch.Tensor` of shape `[rows, nodes + 1]`, int64): ranks of all nodes, that of the root first.
        path (`torch.Tensor` of shape `[rows, depth + 1]`, int64): the root and the accepted nodes, padded.
        parents, usable (`torch.Tensor` of shape `[rows, nodes + 1]`): parents of all nodes, and which nodes count.
    """
    children = (parents[:, None, 1:] == path[:, :, None]) & usable[:, None, 1:]
    return torch.cat([(told * _UNIT).long(), children.sum(dim=2), ranks.gather(1, path)], dim=1)


def read_told(columns: Sequence[int], depth: int, accepted: int) -> Told:
    """What the columns of a row say."""
    chances, offered, ranks = columns[:depth], columns[depth : 2 * depth + 1], columns[2 * depth + 1 :]
    return Told([chance / _UNIT for chance in chances], list(offered[: accepted + 1]), list(ranks[1 : accepted + 1]))
