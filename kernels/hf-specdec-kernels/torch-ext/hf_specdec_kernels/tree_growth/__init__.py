"""Trees that grow on the device: the best paths through a block of positions, and who is above whom."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops import ops, register
from ..checks import check, check_shape
from .naive import best_paths_naive, choose_nodes_naive, tree_ancestors_naive


__all__ = [
    "ChosenNodes",
    "best_paths",
    "best_paths_naive",
    "choose_nodes",
    "choose_nodes_naive",
    "tree_ancestors",
    "tree_ancestors_naive",
]

MOST_CANDIDATES = 8192
"""Candidates of a level that a program holds; of more, plain PyTorch chooses."""
MOST_NODES = 1024
"""Most nodes of a tree, the root not counted."""


def best_paths(
    tokens: torch.Tensor, log_q: torch.Tensor, num_nodes: int, following: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The tree of the `num_nodes` paths with the largest summed log-probability: taken from a heap one after the other,
    the next sibling and the first child of each put into it. Every node of a level has the same children (DDTree,
    github.com/liranringel/ddtree), or those of the list that its own entry names.

    One launch on CUDA.

    Args:
        tokens (`torch.Tensor` of shape `[batch, levels, ranks]`, int64): the best tokens of each level, falling. With
            `following` `[batch, levels, lists, ranks]`: of each list; those of the first level are in list 0.
        log_q (`torch.Tensor` of the same shape, float32): their log-probabilities, falling; NaN counts as -inf.
        num_nodes (`int`): nodes of the tree without its root, at most 1,024. Where there are fewer paths, the last
            nodes are repeated ones.
        following (`torch.Tensor` of the same shape, int64, *optional*): for every token the list of the next level
            that holds its children.

    Returns:
        `tuple`: tokens of the nodes, `[batch, num_nodes]` int64, in the order of the heap, of equals the one that came
        into it first; and the parent of every node, the root's 0 first, `[batch, num_nodes + 1]` int64.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("log_q", log_q, *[None] * (3 if following is None else 4))
    check("log_q", log_q, log_q.device, (torch.float32,), *log_q.shape)
    check("tokens", tokens, log_q.device, (torch.int64,), *log_q.shape)
    if following is not None:
        check("following", following, log_q.device, (torch.int64,), *log_q.shape)
    if not 0 < num_nodes <= MOST_NODES or 0 in log_q.shape[1:]:
        raise ValueError(
            f"`num_nodes` is {num_nodes} for {list(log_q.shape[1:])} levels and ranks; it must be from 1 to "
            f"{MOST_NODES}, and there must be a level and a rank."
        )
    nodes, parents = tokens.new_empty(len(tokens), num_nodes), tokens.new_empty(len(tokens), num_nodes + 1)
    ops.best_paths(tokens, log_q, num_nodes, following, nodes, parents)
    return nodes, parents


class ChosenNodes(NamedTuple):
    """
    The candidates of a level that get children, the best first.

    Args:
        sums (`torch.Tensor` of shape `[batch, above * ranks]`, float32): summed log-probability of every candidate.
        places (`torch.Tensor` of shape `[batch, count]`, int64): places of the chosen ones among the candidates.
        chosen_sums (`torch.Tensor` of shape `[batch, count]`, float32): their sums.
        tokens (`torch.Tensor` of shape `[batch, count]`, int64): their tokens.
        parents (`torch.Tensor` of shape `[batch, count]`, int64): indices of their parents among the nodes above.
        ancestors (`torch.Tensor` of shape `[batch, count, nodes + count]`, bool): what they attend to: what their
            parents do, and themselves.
    """

    sums: torch.Tensor
    places: torch.Tensor
    chosen_sums: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor


def choose_nodes(
    tokens: torch.Tensor, log_q: torch.Tensor, path_log_q: torch.Tensor, ancestors: torch.Tensor, count: int
) -> ChosenNodes:
    """
    Chooses the `count` candidates of a level with the largest summed log-probability, as EAGLE-2 (arXiv 2406.16858)
    expands a tree; of equals the one of the lower place.

    One launch on CUDA, where a row has no more than 8,192 candidates.

    Args:
        tokens (`torch.Tensor` of shape `[batch, above, ranks]`, int64): tokens of the candidates.
        log_q (`torch.Tensor` of shape `[batch, above, ranks]`, float32): their log-probabilities; in what is chosen,
            NaN counts as -inf.
        path_log_q (`torch.Tensor` of shape `[batch, above]`, float32): sums up to the nodes above.
        ancestors (`torch.Tensor` of shape `[batch, above, nodes]`, bool): what the nodes above attend to.
        count (`int`): candidates to choose, at most `above * ranks`.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("log_q", log_q, None, None, None)
    batch, above, ranks = log_q.shape
    device, nodes = log_q.device, ancestors.shape[-1]
    check("log_q", log_q, device, (torch.float32,), *log_q.shape)
    check("tokens", tokens, device, (torch.int64,), *log_q.shape)
    check("path_log_q", path_log_q, device, (torch.float32,), batch, above)
    check("ancestors", ancestors, device, (torch.bool,), batch, above, nodes)
    if not 0 < count <= above * ranks:
        raise ValueError(f"`count` is {count}; it must be from 1 to {above * ranks}.")
    found = ChosenNodes(
        log_q.new_empty(batch, above * ranks),
        tokens.new_empty(batch, count),
        log_q.new_empty(batch, count),
        tokens.new_empty(batch, count),
        tokens.new_empty(batch, count),
        ancestors.new_empty(batch, count, nodes + count),
    )
    ops.choose_nodes(tokens, log_q, path_log_q, ancestors, count, *found)
    return found


def tree_ancestors(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Depths and ancestors of the nodes of trees. One launch on CUDA.

    Args:
        parents (`torch.Tensor` of shape `[rows, nodes]`, int64): the parent of every node, which comes before it; 0
            for node 0, the root.
        depth (`int`): the largest depth, or more.

    Returns:
        `tuple`: the depth of every node, `[rows, nodes]` int64, 0 for the root; and whether node j is node i or an
        ancestor of it, `[rows, nodes (i), nodes (j)]` bool.

    Raises:
        ValueError, TypeError: if shape or dtype of `parents` does not fit.
    """
    check_shape("parents", parents, None, None)
    check("parents", parents, parents.device, (torch.int64,), *parents.shape)
    rows, nodes = parents.shape
    depths = torch.empty_like(parents, memory_format=torch.contiguous_format)
    ancestors = parents.new_empty(rows, nodes, nodes, dtype=torch.bool)
    ops.tree_ancestors(parents, depth, depths, ancestors)
    return depths, ancestors


register(best_paths_naive, results=("nodes", "parents"))
register(
    choose_nodes_naive,
    results=("sums", "places", "chosen_sums", "chosen_tokens", "parents", "chosen_ancestors"),
    suits=lambda *arguments: arguments[1][0].numel() <= MOST_CANDIDATES,
)
register(tree_ancestors_naive, results=("depths", "ancestors"))
