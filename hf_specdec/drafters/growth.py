"""
Growth of a tree, level by level, from a draft's logits, whatever model computes them.

`root_logits` are `[batch, vocab]`; `run_level` forwards one level's nodes (`LevelNodes`) and returns their logits
`[batch, queries, vocab]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .. import kernels
from ..argmax import argmax
from ..trees import DraftTree, DynamicTree, TokenTree, Topology


@dataclass(frozen=True, eq=False)
class LevelNodes:
    """
    Nodes of one level that are forwarded because they get children.

    Args:
        tokens (`torch.Tensor` of shape `[batch, queries]`, int64): the nodes' tokens.
        parents (`torch.Tensor` of shape `[1 or batch, queries]`, int64): for each node, the index of its parent among
            the nodes forwarded in the level above; 0 for the root's children.
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, nodes]`, bool): which of all nodes forwarded so far
            (the queries last) each query attends to, besides the committed tokens.
        node_depths (`torch.Tensor` of shape `[1, nodes]`, int64): depths of all nodes forwarded so far, from 0 for the
            root's children.
        offset (`int`): number of nodes forwarded in earlier levels.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    node_depths: torch.Tensor
    offset: int


RunLevel = Callable[[LevelNodes], torch.Tensor]
Warp = Callable[[torch.Tensor], torch.Tensor]


def grow(
    tree: TokenTree | DynamicTree,
    root_logits: torch.Tensor,
    run_level: RunLevel,
    depth: int,
    warp_if_drawn: Warp | None = None,
) -> DraftTree:
    """
    Fills a tree with the draft's best tokens, or with tokens drawn from the draft's distribution q.

    Args:
        depth (`int`): levels that can be used (a static tree has no more).
        warp_if_drawn (`Callable`, *optional*): function from the draft's logits to the scores of q; children are then
            drawn from the softmax of the scores. Without it, children are the draft's best tokens.
    """
    if warp_if_drawn is not None:
        return grow_drawn(tree, root_logits, run_level, warp_if_drawn, depth)
    if isinstance(tree, DynamicTree):

        def expand(nodes: LevelNodes) -> tuple[torch.Tensor, torch.Tensor]:
            return best_tokens(run_level(nodes), tree.top_k)

        return grow_dynamic(tree, best_tokens(root_logits, tree.top_k), expand, depth)
    return grow_static(tree, root_logits, run_level)


# -------------------------------------------------------------------------------------------------------- static trees


@dataclass(frozen=True, eq=False)
class _Level:
    """
    Index tensors by which one level of a static tree comes from the level above.

    Args:
        num_candidates (`int`): candidate tokens of each parent: the largest rank in the level + 1.
        parent (`torch.Tensor` of shape `[children]`, int64): for each node of the level, the index of its parent among
            the nodes forwarded in the level above.
        candidate (`torch.Tensor` of shape `[children]`, int64, *optional*): for each node of the level, its index
            among all parents' candidates; None if the nodes are the candidates, in order.
        num_forwarded (`int`): number of the level's nodes that have children.
        forwarded (`torch.Tensor` of shape `[num_forwarded]`, int64, *optional*): indices in the level of the nodes
            that have children; None if all have.
        forwarded_parents, ancestors, node_depths, offset: fields of `LevelNodes` for the nodes that have children.
    """

    num_candidates: int
    parent: torch.Tensor
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
                parent=tensor(places),
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


def held_levels(tree: TokenTree | DynamicTree, device: torch.device) -> Any:
    """
    The index tensors by which a static tree grows; None for a dynamic tree. All calls share the tensors of a tree, as
    long as these are cached; a captured graph, which reads them on every replay, must hold them.
    """
    if not isinstance(tree, TokenTree):
        return None
    return _levels(tree, device), Topology.of_tree(tree, device), _score_index(tree, device)


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
    tree: TokenTree | DynamicTree, root_logits: torch.Tensor, run_level: RunLevel, warp: Warp, depth: int
) -> DraftTree:
    """
    Fills a tree with children drawn from the draft's distribution without replacement.

    Args:
        tree (`TokenTree` or `DynamicTree`): a static tree, or the limits of a tree whose budgets are fixed level by
            level.
        warp (`Callable`): makes the scores of q from the draft's logits; q is their softmax.
        depth (`int`): levels that can be used.
    """
    if isinstance(tree, DynamicTree):
        return _grow_budgeted(tree, root_logits, run_level, warp, depth)
    logits, tokens, valid, scores = root_logits[:, None], [], [], []
    parents_valid = torch.ones(len(root_logits), 1, dtype=torch.bool, device=root_logits.device)
    for level in _levels(tree, root_logits.device):
        scores.append(warp(logits))
        drawn, drawable = draw_without_replacement(scores[-1], level.num_candidates)
        tokens.append(_pick(drawn.flatten(1), level.candidate))
        valid.append(_pick(drawable.flatten(1), level.candidate) & parents_valid[:, level.parent])
        parents_valid = _pick(valid[-1], level.forwarded)
        if level.num_forwarded:
            logits = run_level(level.nodes_to_forward(tokens[-1]))
    return DraftTree(
        torch.cat(tokens, dim=1),
        Topology.of_tree(tree, root_logits.device),
        torch.cat(valid, dim=1),
        torch.cat(scores, dim=1),
        _score_index(tree, root_logits.device),
    )


@lru_cache(maxsize=256)
def _score_index(tree: TokenTree, device: torch.device) -> torch.Tensor:
    """Index of the distribution of every node's children in a static tree, or -1: `[1, nodes + 1]` int64."""
    with_children = [node for node, children in enumerate(tree.children) if children]
    places = [with_children.index(node) if node in with_children else -1 for node in range(tree.num_nodes + 1)]
    return torch.tensor([places], device=device)


def draw_without_replacement(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draws `count` different tokens from softmax(scores), in descending order of scores + Gumbel noise (Gumbel-top-k,
    arXiv 1903.06059).

    Args:
        scores (`torch.Tensor` of shape `[…, vocab]`, float32): -inf outside the support.

    Returns:
        `tuple`: tokens `[…, count]` int64, and whether each is in the support, `[…, count]` bool: all False where the
        scores have no softmax (NaN or +inf among them).
    """
    # Relative to the best: beside scores of 1e5, as at a temperature near zero, float32 would round the noise away.
    relative = scores - scores.amax(dim=-1, keepdim=True)  # all NaN where there is no softmax, or one of +inf
    noise = torch.empty_like(scores).exponential_().log_()
    perturbed = (relative - noise).topk(count, dim=-1)
    drawable = (perturbed.values > -torch.inf) & perturbed.values[..., :1].isfinite()
    return perturbed.indices, drawable


# ------------------------------------------------------------------------------------------------------- dynamic trees


BestTokens = tuple[torch.Tensor, torch.Tensor]
"""Tokens `[…, top_k]` int64, the best first, and their log-probabilities, float32."""


def grow_dynamic(
    tree: DynamicTree, root: BestTokens, expand: Callable[[LevelNodes], BestTokens], depth: int
) -> DraftTree:
    """
    EAGLE-2's dynamic tree (arXiv 2406.16858): at each level the best `top_k` nodes by summed log-probability are
    expanded by their `top_k` best tokens; the best `num_nodes` of all candidates stay, in level order.

    Args:
        root (`tuple`): the best tokens after the root, `[batch, top_k]`.
        expand (`Callable`): gives the best tokens after one level's nodes, `[batch, queries, top_k]`.
        depth (`int`): levels that can be used.
    """
    depth, top_k = min(tree.depth, depth), tree.top_k
    best, log_q = root
    batch_size, device = len(best), best.device
    # Candidates of all levels: token, summed log-probability, and the candidate above (-1: the root).
    tokens, sums = [best], [log_q]
    above = [torch.full_like(best, -1)]
    expanded = torch.arange(top_k, device=device).expand(batch_size, -1)  # numbers of the candidates to expand
    expanded_parents = torch.zeros_like(expanded)
    expanded_sums = log_q
    ancestors = torch.eye(top_k, dtype=torch.bool, device=device).expand(batch_size, -1, -1)
    first_of_level = top_k
    for level in range(1, depth):
        all_tokens = torch.cat(tokens, dim=1)
        node_depths = torch.arange(level, device=device).repeat_interleave(top_k)[None]
        nodes = all_tokens.gather(1, expanded)
        best, log_q = expand(LevelNodes(nodes, expanded_parents, ancestors, node_depths, (level - 1) * top_k))
        level_sums = (expanded_sums[:, :, None] + log_q).flatten(1)
        tokens.append(best.flatten(1))
        sums.append(level_sums)
        above.append(expanded.repeat_interleave(top_k, dim=1))
        chosen = level_sums.topk(top_k, dim=-1)
        expanded, expanded_sums = chosen.indices + first_of_level, chosen.values
        first_of_level += top_k**2
        expanded_parents = chosen.indices // top_k
        ancestors = _attend_below(ancestors, expanded_parents)
    return _best_candidates(torch.cat(tokens, 1), torch.cat(sums, 1), torch.cat(above, 1), tree.num_nodes, depth)


def best_tokens(logits: torch.Tensor, count: int, with_log_q: bool = True) -> BestTokens:
    """
    The `count` best tokens for logits `[…, vocab]`, and their log-probabilities in float32, `[…, count]` each. Without
    `with_log_q`, other scores may take the place of log-probabilities, where they are cheaper.
    """
    if kernels.can_pick_tokens(logits, count):
        return kernels.best_tokens(logits, count)
    if not with_log_q:
        best = logits.topk(count, dim=-1)
        return best.indices, best.values
    best = logits.float().log_softmax(dim=-1).topk(count, dim=-1)
    return best.indices, best.values


def _best_candidates(
    tokens: torch.Tensor, sums: torch.Tensor, above: torch.Tensor, num_nodes: int, depth: int
) -> DraftTree:
    """The tree of the best `num_nodes` candidates; all arguments are `[batch, candidates]`, in level order."""
    # Sums fall along a path and ties keep their order, so that a chosen candidate's parent is chosen too.
    order = sums.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :num_nodes].sort(dim=1).values
    nodes = torch.zeros_like(above).scatter(
        1, chosen, torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen)
    )
    above = above.gather(1, chosen)
    parents = torch.where(above < 0, 0, nodes.gather(1, above.clamp(min=0)))
    parents = torch.nn.functional.pad(parents, (1, 0))
    return DraftTree(tokens.gather(1, chosen), Topology.of_parents(parents, depth))


def _attend_below(ancestors: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """
    Ancestor mask of the next level's nodes, `[batch, queries, nodes + queries]`: they attend to what their parents
    attend to, and to themselves. `parents` (`[batch, queries]`) are indices in the level above, `ancestors`
    (`[batch, queries above, nodes]`) is the mask of that level.
    """
    inherited = ancestors.gather(1, parents[:, :, None].expand(-1, -1, ancestors.shape[2]))
    own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    return torch.cat([inherited, own], dim=2)


def _grow_budgeted(
    tree: DynamicTree, root_logits: torch.Tensor, run_level: RunLevel, warp: Warp, depth: int
) -> DraftTree:
    """
    Grows a dynamic tree for sampling. Before any child of a level is drawn, the level's nodes are shared out among the
    (at most `top_k`) most probable nodes above: the most probable (node, rank) pairs by q get one child each. All
    children drawn within these budgets are kept.
    """
    depth, top_k = min(tree.depth, depth), tree.top_k
    batch_size, device = len(root_logits), root_logits.device
    rows = torch.arange(batch_size, device=device)[:, None]
    logits, left = root_logits[:, None], tree.num_nodes
    parents = torch.zeros(batch_size, 1, dtype=torch.long, device=device)  # node numbers of the forwarded nodes
    path_log_q = torch.zeros(batch_size, 1, device=device)
    parents_valid = torch.ones(batch_size, 1, dtype=torch.bool, device=device)
    ancestors, forwarded, num_forwarded, first_node = None, [], 0, 1
    tokens, valid, above, scores, depths = [], [], [], [], []
    for level in range(1, depth + 1):
        queries = parents.shape[1]
        children_each = min(top_k, logits.shape[-1])
        budget = min(-(-left // (depth - level + 1)), queries * children_each)
        scores.append(warp(logits))
        forwarded.append(parents)
        log_q = scores[-1].log_softmax(dim=-1)
        counts = _share_out(path_log_q[:, :, None] + log_q.topk(children_each, dim=-1).values, budget)
        drawn, drawable = draw_without_replacement(scores[-1], children_each)
        wanted = torch.arange(children_each, device=device) < counts[:, :, None]
        places = (~wanted).flatten(1).sort(dim=1, stable=True).indices[:, :budget]
        parent = places // children_each
        tokens.append(drawn.flatten(1).gather(1, places))
        valid.append(drawable.flatten(1).gather(1, places) & parents_valid.gather(1, parent))
        above.append(parents.gather(1, parent))
        left -= budget
        if level == depth or left == 0:
            break
        path = path_log_q.gather(1, parent) + log_q[rows, parent, tokens[-1]]
        best = path.masked_fill(~valid[-1], -torch.inf).topk(min(top_k, budget), dim=1).indices.sort(dim=1).values
        path_log_q, parents_valid = path.gather(1, best), valid[-1].gather(1, best)
        parents = first_node + best
        first_node += budget
        places_above = parent.gather(1, best)
        if ancestors is None:
            ancestors = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        else:
            ancestors = _attend_below(ancestors, places_above)
        depths.append(torch.full((1, best.shape[1]), level - 1, dtype=torch.long, device=device))
        node_depths = torch.cat(depths, dim=1)
        nodes = tokens[-1].gather(1, best)
        logits = run_level(LevelNodes(nodes, places_above, ancestors, node_depths, num_forwarded))
        num_forwarded += best.shape[1]
    parents_of_nodes = torch.nn.functional.pad(torch.cat(above, dim=1), (1, 0))
    return DraftTree(
        torch.cat(tokens, dim=1),
        Topology.of_parents(parents_of_nodes, len(tokens)),
        torch.cat(valid, dim=1),
        torch.cat(scores, dim=1),
        _index_of(torch.cat(forwarded, dim=1), parents_of_nodes.shape[1]),
    )


def _share_out(log_gains: torch.Tensor, budget: int) -> torch.Tensor:
    """
    Number of children per node, `[batch, queries]` int64, `budget` per row in all: each of the `budget` largest
    `log_gains` of a row (`[batch, queries, ranks]`, falling along the ranks) counts one for its node.
    """
    chosen = log_gains.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :budget]
    ones = torch.ones_like(chosen)
    return torch.zeros(log_gains.shape[:2], dtype=torch.long, device=chosen.device).scatter_add(
        1, chosen // log_gains.shape[2], ones
    )


def _index_of(forwarded: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Index of every row's nodes among the forwarded ones (`[batch, forwarded]`), or -1: `[batch, nodes]` int64."""
    places = torch.arange(forwarded.shape[1], device=forwarded.device).expand_as(forwarded)
    return torch.full((len(forwarded), num_nodes), -1, device=forwarded.device).scatter(1, forwarded, places)
