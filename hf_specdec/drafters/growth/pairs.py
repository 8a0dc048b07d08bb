"""
Growth of trees from logits that depend on a token's position and on the token before it, as of Markov heads.

Each position's likeliest tokens are its candidates. What one of them gains after one of those of the position before
is a product of two vectors: all pairs of all positions are scored at once, every candidate keeps a list of the best
tokens after it, and a tree is a walk through the lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels import DEVICES, kernels_are_installed
from ...trees import DraftTree, DynamicTree, TokenTree, Topology
from .best_tokens import best_tokens
from .positions import best_paths, places_by_level


if TYPE_CHECKING:
    from hf_specdec_kernels import PairLists

    from ...block import BlockHead

FEWEST_CANDIDATES, MOST_CANDIDATES = 64, 512
"""Candidates of a position. SmolLM2's DSpark head lost 7 % of its acceptance with 64 of its tokens, 1 % with 512."""
MOST_PAIRS = 1 << 24
"""Pairs of all rows and positions, above which there are fewer candidates than `MOST_CANDIDATES`."""


def pairs_of(
    head: BlockHead,
    logits: torch.Tensor,
    states: torch.Tensor,
    roots: torch.Tensor,
    target_ids: torch.Tensor | None,
    tree: TokenTree | DynamicTree,
) -> PairLists:
    """
    Scores pairs of tokens, and lists the best ones after each candidate: as many as a tree has children of a node.
    Where a head adds to the logits of all tokens, those that are no candidates count in the log-probabilities with the
    logits that they have without regard to the token before.

    Args:
        head (`BlockHead`): a head that pairs tokens.
        logits (`torch.Tensor` of shape `[batch, levels, draft vocab]`): the positions' logits without regard to the
            token before.
        states (`torch.Tensor` of shape `[batch, levels, H]`): their states.
        roots (`torch.Tensor` of shape `[batch, 1]`, int64): the roots, as the target numbers tokens.
        target_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's number of each token.
        tree (`TokenTree` or `DynamicTree`): the tree that is to grow from them.

    Returns:
        `PairLists`: tokens as the draft numbers them.

    Raises:
        ValueError: if a node of a static tree has more children than a position has candidates.
    """
    from hf_specdec_kernels import pair_lists
    from hf_specdec_kernels.pair_lists import PairLists, pair_lists_naive

    selector = head.candidate_selector
    conditions = selector or head.markov_head
    assert conditions is not None and conditions.keys is not None
    count = _num_candidates(*logits.shape[:2]) if selector is None else selector.top_k
    tokens, log_q = best_tokens(logits, min(count, logits.shape[-1]), in_order=False)
    above = tokens[:, :-1] if target_ids is None else target_ids[tokens[:, :-1]]
    parents = torch.cat([roots[:, None].expand(-1, 1, tokens.shape[2]), above], dim=1)
    queries = conditions.queries(states[:, :, None], parents)
    ranks = _children_of(tree, tokens.shape[2])
    arguments = tokens, log_q, queries, conditions.keys, ranks, selector is None
    by_kernel = logits.device.type in DEVICES and kernels_are_installed()
    return pair_lists(*arguments) if by_kernel else PairLists(*pair_lists_naive(*arguments))


def _children_of(tree: TokenTree | DynamicTree, candidates: int) -> int:
    """The most children of a node, of which a dynamic tree has no more than there are candidates."""
    if isinstance(tree, DynamicTree):
        return min(tree.top_k, candidates)
    children = max(tree.ranks) + 1
    if children > candidates:
        raise ValueError(
            f"`tree` asks for {children} children of a node, but the head scores {candidates} tokens of a position. "
            "Use a narrower tree."
        )
    return children


def _num_candidates(rows: int, levels: int) -> int:
    count = MOST_CANDIDATES
    while count > FEWEST_CANDIDATES and rows * levels * count**2 > MOST_PAIRS:
        count //= 2
    return count


def grow_from_pairs(tree: TokenTree | DynamicTree, pairs: PairLists, depth: int) -> DraftTree:
    """
    Fills a tree with the best tokens after each node. A dynamic tree holds the best paths of all, with up to `top_k`
    children for every node.

    Args:
        pairs (`PairLists`): the lists, which have as many tokens as a node may have children.
        depth (`int`): levels that can be used, of which there are lists (a static tree has no more).
    """
    if isinstance(tree, TokenTree):
        return _grow_static(tree, pairs)
    levels = min(tree.depth, depth)
    tokens, log_q, following = (part[:, :levels] for part in pairs)
    num_paths = sum(tokens.shape[3] ** level for level in range(1, levels + 1))
    nodes, parents = best_paths(tokens, log_q, min(tree.num_nodes, num_paths), following)
    return DraftTree(nodes, Topology.of_parents(parents, levels))


def _grow_static(tree: TokenTree, pairs: PairLists) -> DraftTree:
    device, ranks = pairs.tokens.device, pairs.tokens.shape[3]
    lists = torch.zeros(len(pairs.tokens), 1, dtype=torch.long, device=device)  # of the nodes above, each its own
    found = []
    for level, (parents, of_parent) in enumerate(places_by_level(tree, device)):
        entries = lists.index_select(1, parents) * ranks + of_parent
        found.append(pairs.tokens[:, level].flatten(1).gather(1, entries))
        lists = pairs.following[:, level].flatten(1).gather(1, entries)
    return DraftTree(torch.cat(found, dim=1), Topology.of_tree(tree, device))
