"""Verification walks in plain PyTorch: float64, all rows at once, node by node."""

from __future__ import annotations

import torch

from .filters import target_probabilities
from .walks import Walks, WalkState


def greedy_walk_naive(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_depth: int,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> Walks:
    """See `hf_specdec_kernels.greedy_walk`."""
    walk = WalkState(tokens, parents, max_depth, end_tokens, active)
    return walk.along(lambda: walk.at_node(logits).float().argmax(dim=-1))


def chosen_walk_naive(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_depth: int,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> Walks:
    """See `hf_specdec_kernels.chosen_walk`."""
    walk = WalkState(tokens, parents, max_depth, end_tokens, active)
    return walk.along(lambda: walk.at_node(chosen))


def target_walk_naive(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    max_depth: int,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> Walks:
    """See `hf_specdec_kernels.target_walk`."""
    walk = WalkState(tokens, parents, max_depth, end_tokens, active)

    def drawn() -> torch.Tensor:
        p = target_probabilities(walk.at_node(logits), temperature, top_k, top_p)
        return draw(p, walk.at_node(uniforms))

    return walk.along(drawn)


def rejection_walk_naive(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    max_depth: int,
    draft_index: torch.Tensor | None = None,
    draft_columns: torch.Tensor | None = None,
    draft_temperature: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    end_tokens: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> Walks:
    """See `hf_specdec_kernels.rejection_walk`."""
    walk = WalkState(tokens, parents, max_depth, end_tokens, active)
    while walk.walking.any():
        p = target_probabilities(walk.at_node(logits), temperature, top_k, top_p)
        log_q, has_q = _draft_scores(walk, draft_logits, draft_index, draft_columns, draft_temperature)
        accepted = torch.full_like(walk.node, -1)
        for child in range(1, walk.num_nodes):
            tested = walk.walking & (accepted < 0) & has_q & walk.is_child(child)
            if not tested.any():
                continue
            token = walk.tokens[:, child : child + 1].clamp(min=0)
            # A child cannot have been drawn from a q without any token left.
            tested &= (log_q > -torch.inf).any(dim=-1)
            q = log_q.softmax(dim=-1).nan_to_num()
            passes = (uniforms[:, child, None].double() * q.gather(1, token) < p.gather(1, token))[:, 0]
            accepted = torch.where(tested & passes, child, accepted)
            refused = (tested & ~passes)[:, None]
            residual = (p - q).clamp(min=0)
            total = residual.sum(dim=-1, keepdim=True)
            # Where the residual is empty, p and q differ by rounding only, and p is kept.
            p = torch.where(refused & (total > 0), residual / total, p)
            log_q = torch.where(refused, log_q.scatter(1, token, -torch.inf), log_q)
        walk.step(accepted, draw(p, uniforms[:, 0]))
    return walk.result()


def _draft_scores(
    walk: WalkState,
    draft_logits: torch.Tensor,
    draft_index: torch.Tensor | None,
    draft_columns: torch.Tensor | None,
    draft_temperature: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log q (up to a constant) over the target's tokens, `[batch, vocab]` float64, and whether a row has a q."""
    place = walk.node if draft_index is None else walk.at_node(draft_index)
    has_q = (place >= 0) & (place < draft_logits.shape[1])
    scores = draft_logits[walk.rows, place.clamp(0, draft_logits.shape[1] - 1)].float()
    if draft_temperature is not None:
        scores = scores / draft_temperature[:, None].float()
    scores = scores.double()
    if draft_columns is not None:
        columns = draft_columns.long()
        scores = torch.where(columns >= 0, scores[:, columns.clamp(min=0)], -torch.inf)
    return scores, has_q


def draw(p: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """
    Draws a token per row by inverse transform sampling, `[batch]` int64: the first token at which the running sum of
    `p` (`[batch, vocab]` float64, not normalised) exceeds `uniforms` (`[batch]`, in [0, 1)) times the sum of `p`.
    """
    running = p.cumsum(dim=-1)
    goal = uniforms.double()[:, None] * running[:, -1:]
    exceeds = (running > goal) & (p > 0)
    last = p.shape[1] - 1 - (p > 0).flip(1).int().argmax(dim=1)  # taken if rounding lets no running sum exceed
    return torch.where(exceeds.any(dim=1), exceeds.int().argmax(dim=1), last)
