"""
Growth of trees from logits that depend on a token's position and on the token before it, as of Markov heads.

Each position's likeliest tokens are its candidates. What one of them gains after one of those of the position before
is a product of two vectors: all pairs of all positions are scored at once, and a tree is a walk over the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ...trees import DraftTree, DynamicTree, TokenTree, Topology
from .best_tokens import best_tokens
from .nodes import LevelNodes
from .positions import best_paths
from .static import grow_static


if TYPE_CHECKING:
    from ...block import BlockHead

FEWEST_CANDIDATES, MOST_CANDIDATES = 64, 512
"""Candidates of a position. SmolLM2's DSpark head lost 7 % of its acceptance with 64 of its tokens, 1 % with 512."""
MOST_PAIRS = 1 << 24
"""Pairs of all rows and positions, above which there are fewer candidates than `MOST_CANDIDATES`."""


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """
    The candidates of each position after the root, and what they are worth after each of those before.

    Args:
        tokens (`torch.Tensor` of shape `[batch, levels, candidates]`, int64): the candidates, as the draft numbers
            tokens.
        log_q (`torch.Tensor` of shape `[batch, levels, candidates before, candidates]`, float32): log-probability of
            each candidate given the one before; on the first level given the root, whichever it is.
    """

    tokens: torch.Tensor
    log_q: torch.Tensor


def pairs_of(
    head: BlockHead, logits: torch.Tensor, states: torch.Tensor, roots: torch.Tensor, target_ids: torch.Tensor | None
) -> TokenPairs:
    """
    Scores pairs of tokens. Where a head adds to the logits of all tokens, those that are no candidates count in the
    log-probabilities with the logits that they have without regard to the token before.

    Args:
        head (`BlockHead`): a head that pairs tokens.
        logits (`torch.Tensor` of shape `[batch, levels, draft vocab]`): the positions' logits without regard to the
            token before.
        states (`torch.Tensor` of shape `[batch, levels, H]`): their states.
        roots (`torch.Tensor` of shape `[batch, 1]`, int64): the roots, as the target numbers tokens.
        target_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's number of each token.
    """
    selector = head.candidate_selector
    conditions = selector or head.markov_head
    assert conditions is not None and conditions.keys is not None
    count = _num_candidates(*logits.shape[:2]) if selector is None else selector.top_k
    tokens, log_q = best_tokens(logits, min(count, logits.shape[-1]))
    above = tokens[:, :-1] if target_ids is None else target_ids[tokens[:, :-1]]
    parents = torch.cat([roots[:, None].expand(-1, 1, tokens.shape[2]), above], dim=1)
    queries = conditions.queries(states[:, :, None], parents)
    gained = queries @ conditions.keys[tokens].transpose(2, 3)
    scores = log_q[:, :, None] + gained.float()
    if selector is None:
        others = (1 - log_q.exp().sum(dim=2)).clamp(min=0).log()
        scores = torch.cat([scores, others[:, :, None, None].expand(-1, -1, scores.shape[2], 1)], dim=3)
    return TokenPairs(tokens, scores.log_softmax(dim=3)[..., : tokens.shape[2]])


def _num_candidates(rows: int, levels: int) -> int:
    count = MOST_CANDIDATES
    while count > FEWEST_CANDIDATES and rows * levels * count**2 > MOST_PAIRS:
        count //= 2
    return count


def grow_from_pairs(tree: TokenTree | DynamicTree, pairs: TokenPairs, depth: int) -> DraftTree:
    """
    Fills a tree with the best tokens after each node. A dynamic tree holds the best paths of all, with up to `top_k`
    children for every node.

    Args:
        pairs (`TokenPairs`): the candidates.
        depth (`int`): levels that can be used, of which there are pairs (a static tree has no more).
    """
    tokens, log_q = pairs.tokens, pairs.log_q
    if isinstance(tree, TokenTree):
        levels_below = iter(log_q[:, 1:].unbind(dim=1))

        def run_level(nodes: LevelNodes) -> torch.Tensor:  # whose tokens are numbers of candidates
            return next(levels_below).gather(1, nodes.tokens[:, :, None].expand(-1, -1, log_q.shape[3]))

        draft = grow_static(tree, log_q[:, 0, 0], run_level)
        sizes = [end - start for start, end in pairwise(tree.level_offsets[1:])]
        numbers = draft.tokens.split(sizes, dim=1)
        named = [tokens[:, level].gather(1, of_level) for level, of_level in enumerate(numbers)]
        return replace(draft, tokens=torch.cat(named, dim=1))
    levels, ranks = min(tree.depth, depth), min(tree.top_k, log_q.shape[3])
    best, places = log_q[:, :levels].topk(ranks, dim=3)
    names = tokens[:, :levels, None].expand(-1, -1, places.shape[2], -1).gather(3, places)
    num_paths = sum(ranks**level for level in range(1, levels + 1))
    nodes, parents = best_paths(names, best, min(tree.num_nodes, num_paths), places)
    return DraftTree(nodes, Topology.of_parents(parents, levels))
