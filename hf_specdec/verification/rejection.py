"""Recursive rejection sampling, for children drawn from the draft without replacement."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..random_generators import generator_held
from ..trees import DraftTree
from .distribution import TargetDistribution
from .walk import Walk


def walk_by_rejection(
    draft: DraftTree,
    distribution: TargetDistribution,
    rows: list[int],
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> Walk:
    """
    Walks every row down its tree by recursive rejection sampling without replacement (arXiv 2402.14160, 2402.12374).

    At a node with p₀ = p and q₀ = q, the i-th drawn child x is accepted with probability min(1, pᵢ(x) / qᵢ(x)). On a
    refusal pᵢ₊₁ = normalise(max(pᵢ − qᵢ, 0)), and qᵢ₊₁ is qᵢ without x, renormalised. When no child is accepted, the
    next token is drawn from the last p. A child that was not drawn but proposed for certain has a q of one token. The
    arithmetic is float64; a residual that is numerically empty falls back to p.

    Args:
        draft (`DraftTree`): the step's tree, with the `scores` its children were drawn from.
        distribution (`TargetDistribution`): p at the nodes.
        rows (`list[int]`): rows that walk.
        observe (`Callable`, *optional*): is called with p and log q (up to a constant) at the root, `[rows, vocab]`.

    Returns:
        `Walk`: for every row its path and its tokens, the last of which is the bonus or recovered token.

    Raises:
        RuntimeError: as in plain `generate`, if there is nothing to draw from where a walk stands.
        ValueError: if the children of a node were not drawn.
    """
    walk = Walk.start(distribution.batch_size, rows)
    while rows:
        p = distribution.scores(rows, walk).double().softmax(dim=-1)
        children = [_children(draft, row, walk.node(row)) for row in rows]
        if observe is not None:
            _show_roots(observe, p, draft, rows, children)
            observe = None
        accepted, p = _try_children(p, draft, rows, walk, children)
        with generator_held(p.device):
            drawn = torch.multinomial(p, num_samples=1)[:, 0]
        places, tokens = distribution.agree(torch.stack([accepted, drawn])).tolist()
        walking = []
        for row, place, token, candidates in zip(rows, places, tokens, children, strict=True):
            if place < 0:
                walk.tokens[row].append(token)
                continue
            child, child_token = candidates[place]
            walk.tokens[row].append(child_token)
            walk.step(row, child)
            if not distribution.ends(row, child_token):
                walking.append(row)
        rows = walking
    return walk


def _show_roots(
    observe: Callable[[torch.Tensor, torch.Tensor], None],
    p: torch.Tensor,
    draft: DraftTree,
    rows: list[int],
    children: list[list[tuple[int, int]]],
) -> None:
    drafted = [place for place, candidates in enumerate(children) if _has_drawn(draft, candidates)]
    if drafted:
        scores = torch.stack([draft.scores_of(rows[place], 0) for place in drafted])
        observe(p[drafted], scores.to(p.device))


def _has_drawn(draft: DraftTree, candidates: list[tuple[int, int]]) -> bool:
    return any(draft.is_drawn(child) for child, _ in candidates)


def _children(draft: DraftTree, row: int, node: int) -> list[tuple[int, int]]:
    """The (node, token) of every valid child, in the order they were drawn."""
    tokens = draft.tokens_list[row]
    return [(child, tokens[child - 1]) for child in draft.topology.children_of(row, node) if tokens[child - 1] >= 0]


def _try_children(
    p: torch.Tensor, draft: DraftTree, rows: list[int], walk: Walk, children: list[list[tuple[int, int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Tests the children of one node per row, in order.

    Returns:
        `tuple`: the place of the accepted child among the row's children, or -1, `[rows]`; and p after all refusals
        (the residual), `[rows, vocab]` float64.
    """
    accepted = torch.full((len(rows),), -1, device=p.device)
    most = max(map(len, children))
    if most == 0:
        return accepted, p
    log_q = torch.stack(
        [
            draft.scores_of(row, walk.node(row)) if _has_drawn(draft, candidates) else p.new_zeros(p.shape[1])
            for row, candidates in zip(rows, children, strict=True)
        ]
    )
    log_q = log_q.double().to(p.device)
    padded = [[token for _, token in candidates] + [-1] * (most - len(candidates)) for candidates in children]
    tokens = torch.tensor(padded, device=p.device)
    certain = [[not draft.is_drawn(child) for child, _ in own] + [False] * (most - len(own)) for own in children]
    are_certain = torch.tensor(certain, device=p.device) if any(map(any, certain)) else None
    for place in range(most):
        token = tokens[:, place : place + 1]
        open_rows = (accepted[:, None] < 0) & (token >= 0)
        if p.device.type == "cpu" and not open_rows.any():
            break  # elsewhere it would synchronize
        q = log_q.softmax(dim=-1)
        token = token.clamp(min=0)
        if are_certain is not None:
            q = torch.where(are_certain[:, place : place + 1], torch.zeros_like(q).scatter(1, token, 1.0), q)
        q_token = q.gather(1, token)
        with generator_held(p.device):
            uniforms = torch.rand_like(q_token)
        passes = uniforms * q_token < p.gather(1, token)
        accepted = torch.where((open_rows & passes)[:, 0], place, accepted)
        refused = open_rows & ~passes
        residual = (p - q).clamp(min=0)
        total = residual.sum(dim=-1, keepdim=True)
        p = torch.where(refused & (total > 0), residual / total, p)
        if are_certain is not None:
            refused &= ~are_certain[:, place : place + 1]
        log_q = torch.where(refused, _without(log_q, token), log_q)
    return accepted, p


def _without(log_q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """
    log q (up to a constant) without one token per row (`[rows, 1]`). In logarithms: at a low temperature what is
    left of q may be smaller than any float64, and is a distribution all the same.
    """
    return log_q.scatter(1, token, -torch.inf)
