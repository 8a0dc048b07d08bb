"""A draft's confidence in a step at hand, joined with what was learnt of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .auto_tables import AcceptanceTable, likeliest_paths
from .token_tree import TokenTree


LEAST_CHANCE, MOST_CHANCE = 0.02, 0.97


@dataclass(frozen=True, eq=False)
class Calibration:
    """
    How a draft's estimates of its acceptance are read.

    Args:
        learnt (`list[list[float]]`): acceptance probabilities `[depth][rank]` by earlier steps.
        share (`float`): weight of the estimates beside these, from 0 to 1.
        factor (`float`): how often estimates came true, over what they said.
    """

    learnt: list[list[float]]
    share: float
    factor: float


class RowOutcome(NamedTuple):
    """
    The draft's confidence in a row of a step, and what came of it; or of a dynamic tree what came of it.

    Args:
        chances (`list[float]`): the draft's estimate for the best child of every level; none of a dynamic tree.
        offered (`list[int]`): number of drafted children of the root and of the accepted nodes, by depth.
        ranks (`list[int]`): ranks of the accepted nodes.
    """

    chances: list[float]
    offered: list[int]
    ranks: list[int]


def calibrated_chances(
    confidences: torch.Tensor, learnt: torch.Tensor, share: torch.Tensor | float, factor: torch.Tensor | float
) -> torch.Tensor:
    """
    Acceptance probabilities in the step at hand, `[rows, depth, ranks]`: those learnt, with the best child's by its
    estimate. The other children share what it leaves as they do by `learnt`, so that none rises above it.

    Args:
        confidences (`torch.Tensor` of shape `[rows, depth]`): the draft's estimate for the best child of each level.
        learnt (`torch.Tensor` of shape `[depth, ranks]`), share, factor (`torch.Tensor` or `float`): see
            `Calibration`.
    """
    usual = learnt[:, 0]
    best = share * (confidences * factor).clamp(LEAST_CHANCE, MOST_CHANCE) + (1.0 - share) * usual
    scale = torch.minimum((1.0 - best) / (1.0 - usual), best / usual)
    chances = torch.cat([best[..., None], scale[..., None] * learnt[:, 1:]], dim=-1)
    return torch.where(((usual > 0.0) & (usual < 1.0))[:, None], chances, learnt)


CERTAINTIES, FLAT = (0.5, 0.7, 0.9), (0.35, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
"""
Chances of the best child at every level, and those of all children of a draft that is sure of none, for which a wide
tree has the likeliest nodes.
"""


@lru_cache(maxsize=64)
def wide_tree(tree: TokenTree, max_children: int) -> TokenTree:
    """
    The nodes of `tree`, and of the best trees of as many nodes and levels for drafts that are less and more certain:
    those among which a step chooses by its draft's confidence.
    """
    found = dict.fromkeys(tree.paths)
    drafts = [AcceptanceTable(tree.depth, max_children, (best,)).chances() for best in CERTAINTIES]
    for chances in (*drafts, [list(FLAT[:max_children])] * tree.depth):
        found |= dict.fromkeys(path for _, path in likeliest_paths(chances, tree.num_nodes, tree.depth))
    return TokenTree(tuple(found))
