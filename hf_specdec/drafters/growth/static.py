"""Growth of a static tree, level by level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...trees import DraftTree, DynamicTree, TokenTree, Topology
from ...verification.choosing import argmax
from .best_tokens import best_tokens
from .drawing import Draws
from .dynamic import level_constants
from .nodes import LevelNodes, Noise, RunLevel, Warp
from .positions import places_by_level, ranks_by_level


@dataclass(frozen=True, eq=False)
class _Level:
    """
    Index tensors by which one level of a static tree comes from the level above.

    Args:
        num_candidates (`int`): candidate tokens of each parent: the largest rank in the level + 1.
        candidate (`torch.Tensor` of shape `[children]`, int64, *optional*): for each node of the level, its index
            among all parents' candidates; None if the nodes are the candidates, in order.
        num_forwarded (`int`): number of the level's nodes that have children.
        forwarded (`torch.Tensor` of shape `[num_forwarded]`, int64, *optional*): indices in the level of the nodes
            that have children; None if all have.
        forwarded_parents, ancestors, node_depths, offset: fields of `LevelNodes` for the nodes that have children.
    """

    num_candidates: int
    candidate: torch.Tensor | None
    num_forwarded: int
    forwarded: torch.Tensor | None
    forwarded_parents: torch.Tensor
    ancestors: torch.Tensor
    node_depths: torch.Tensor
    offset: int

    def nodes_to_forward(self, tokens: torch.Tensor) -> LevelNodes:
        """The level's nodes that have children; `tokens` (`[batch, children]`) are the tokens of all its nodes."""
        tokens = _pick(tokens, self.forwarded)
        return LevelNodes(tokens, self.forwarded_parents, self.ancestors, self.node_depths, self.offset)


@lru_cache(maxsize=256)
def _levels(tree: TokenTree, device: torch.device) -> list[_Level]:
    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    levels: list[_Level] = []
    parents, all_forwarded = [0], list[int]()
    for depth in range(1, tree.depth + 1):
        nodes = list(range(tree.level_offsets[depth], tree.level_offsets[depth + 1]))
        forwarded = [node for node in nodes if tree.children[node]]
        offset = len(all_forwarded)
        all_forwarded = all_forwarded + forwarded
        num_candidates = max(tree.ranks[node] for node in nodes) + 1
        places = [parents.index(tree.parents[node]) for node in nodes]
        candidates = [place * num_candidates + tree.ranks[node] for place, node in zip(places, nodes, strict=True)]
        levels.append(
            _Level(
                num_candidates=num_candidates,
                candidate=None if candidates == list(range(num_candidates * len(parents))) else tensor(candidates),
                num_forwarded=len(forwarded),
                forwarded=None if forwarded == nodes else tensor([nodes.index(node) for node in forwarded]),
                forwarded_parents=tensor([parents.index(tree.parents[node]) for node in forwarded])[None],
                ancestors=tree.ancestors[forwarded][:, all_forwarded][None].to(device),
                node_depths=tensor([tree.depths[node] - 1 for node in all_forwarded])[None],
                offset=offset,
            )
        )
        parents = forwarded
    return levels


def held_levels(tree: TokenTree | DynamicTree, device: torch.device) -> object:
    """
    The index tensors by which a tree grows. All calls share the tensors of a tree, as long as these are cached; a
    captured graph, which reads them on every replay, must hold them.
    """
    if not isinstance(tree, TokenTree):
        return level_constants(tree.depth, tree.top_k, device)
    return (
        _levels(tree, device),
        Topology.of_tree(tree, device),
        _score_index(tree, device),
        ranks_by_level(tree, device),
        places_by_level(tree, device),
    )


def grow_static(tree: TokenTree, root_logits: torch.Tensor, run_level: RunLevel) -> DraftTree:
    """Fills a static tree with the draft's best tokens, by rank."""
    logits, levels = root_logits[:, None], []
    for level in _levels(tree, root_logits.device):
        if level.num_candidates > 1:
            best = best_tokens(logits, level.num_candidates, with_log_q=False)[0].flatten(1)
        else:
            best = argmax(logits)
        levels.append(_pick(best, level.candidate))
        if level.num_forwarded:
            logits = run_level(level.nodes_to_forward(levels[-1]))
    return DraftTree(torch.cat(levels, dim=1), Topology.of_tree(tree, root_logits.device))


def _pick(values: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """The columns `places` of `values` (`[batch, values]`), or all columns if `places` is None."""
    return values if places is None else values.index_select(1, places)


def grow_drawn(
    tree: TokenTree, root_logits: torch.Tensor, run_level: RunLevel, warp: Warp, noise: Noise | None = None
) -> DraftTree:
    """
    Fills a static tree with children drawn from the draft's distribution without replacement.

    Args:
        warp (`Callable`): makes the scores of q from the draft's logits; q is their softmax.
        noise (`Callable`, *optional*): the noise by which children are drawn; see `grow`.
    """
    logits, tokens, log_q = root_logits[:, None], [], []
    draws, topology = Draws(warp, root_logits, noise), Topology.of_tree(tree, root_logits.device)
    for level in _levels(tree, root_logits.device):
        drawn = draws.draw(logits, level.num_candidates)
        tokens.append(_pick(drawn.tokens.flatten(1), level.candidate))
        log_q.append(_pick(drawn.log_q.flatten(1), level.candidate))
        if level.num_forwarded:
            logits = run_level(level.nodes_to_forward(tokens[-1]))
    is_void = (torch.cat(log_q, dim=1) == -torch.inf)[:, None] & topology.ancestors[:, 1:, 1:]
    return DraftTree(
        torch.cat(tokens, dim=1),
        topology,
        ~is_void.any(dim=2),  # nothing below a void node counts
        score_index=_score_index(tree, root_logits.device),
        **draws.of_tree(),
    )


@lru_cache(maxsize=256)
def _score_index(tree: TokenTree, device: torch.device) -> torch.Tensor:
    """Index of the distribution of every node's children in a static tree, or -1: `[1, nodes + 1]` int64."""
    with_children = [node for node, children in enumerate(tree.children) if children]
    places = [with_children.index(node) if node in with_children else -1 for node in range(tree.num_nodes + 1)]
    return torch.tensor([places], device=device)
