"""Verification by the target alone: choose its next token, and see whether it is a child."""

from __future__ import annotations

import torch

from ..trees import DraftTree
from .choosing import NOTHING_TO_DRAW_FROM, choose
from .distribution import TargetDistribution
from .walk import Walk


_NOTHING = -1
"""In place of a token, where there is none to draw."""


def walk_target(draft: DraftTree, distribution: TargetDistribution, rows: list[int], do_sample: bool) -> Walk:
    """
    Walks every row down its tree: at each node the target's next token is its argmax (greedy) or drawn from p; a child
    that holds it is accepted, else the walk ends there with that token. Exact whatever the children are, since they
    have no part in the choice.

    Args:
        draft (`DraftTree`): the step's tree.
        distribution (`TargetDistribution`): p at the nodes.
        rows (`list[int]`): rows that walk.
        do_sample (`bool`): whether to draw from p, rather than take its argmax.

    Raises:
        RuntimeError: as in plain `generate`, if there is nothing to draw from where a walk stands.
    """
    walk = Walk.start(distribution.batch_size, rows)
    # Reads all nodes at once: one launch is cheaper than one wait per depth on an accelerator, a bare argmax anywhere.
    reads_ahead = distribution.reads_ahead or (not do_sample and distribution.is_bare)
    ahead = distribution.agree(_choose_ahead(distribution.all_scores(), do_sample)).tolist() if reads_ahead else None
    while rows:
        if ahead is not None:
            chosen = [ahead[row][walk.node(row)] for row in rows]
            if _NOTHING in chosen:
                raise RuntimeError(NOTHING_TO_DRAW_FROM)
        else:
            chosen = distribution.choose(rows, walk, do_sample)
        walking = []
        for row, token in zip(rows, chosen, strict=True):
            child = draft.child_with(row, walk.node(row), token)
            walk.tokens[row].append(token)
            if child is not None:
                walk.step(row, child)
                if not distribution.ends(row, token):
                    walking.append(row)
        rows = walking
    return walk


def _choose_ahead(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """
    The next token of every node, `[batch, nodes + 1]`; `_NOTHING` where it cannot be drawn, since the scores have no
    softmax: that matters only to a walk that comes there.
    """
    if not do_sample:
        return choose(scores, do_sample)
    is_hopeless = ~scores.amax(dim=-1).isfinite()
    chosen = choose(scores.masked_fill(is_hopeless[..., None], 0.0), do_sample)
    return chosen.masked_fill(is_hopeless, _NOTHING)
