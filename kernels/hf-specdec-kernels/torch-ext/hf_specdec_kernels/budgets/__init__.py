"""Budgets of a level of a dynamic tree whose children are drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops import ops, register
from ..checks import check, check_shape
from .naive import share_out_naive


__all__ = ["BudgetedLevel", "share_out", "share_out_naive"]

MOST_PAIRS = 8192
"""Pairs of a node and a rank that a program holds; with more, plain PyTorch shares out."""
RESULTS = (
    "tokens",
    "node_valid",
    "parents",
    "chosen",
    "chosen_log_q",
    "chosen_tokens",
    "chosen_valid",
    "chosen_above",
)


class BudgetedLevel(NamedTuple):
    """
    The nodes of a level, and those of them that get children.

    Args:
        tokens (`torch.Tensor` of shape `[batch, budget]`, int64): token of every node.
        valid (`torch.Tensor` of shape `[batch, budget]`, bool): whether a node counts.
        parents (`torch.Tensor` of shape `[batch, budget]`, int64): number of every node's parent.
        chosen (`torch.Tensor` of shape `[batch, chosen]`, int64): numbers of the nodes that get children, in order.
        path_log_q (`torch.Tensor` of shape `[batch, chosen]`, float32): log q of the paths to them.
        chosen_tokens (`torch.Tensor` of shape `[batch, chosen]`, int64): their tokens.
        chosen_valid (`torch.Tensor` of shape `[batch, chosen]`, bool): whether they count.
        chosen_above (`torch.Tensor` of shape `[batch, chosen]`, int64): index of their parents among the nodes above.
    """

    tokens: torch.Tensor
    valid: torch.Tensor
    parents: torch.Tensor
    chosen: torch.Tensor
    path_log_q: torch.Tensor
    chosen_tokens: torch.Tensor
    chosen_valid: torch.Tensor
    chosen_above: torch.Tensor


def share_out(
    numbers: torch.Tensor,
    path_log_q: torch.Tensor,
    valid: torch.Tensor,
    best: torch.Tensor,
    drawn: torch.Tensor,
    drawn_log_q: torch.Tensor,
    budget: int,
    num_chosen: int,
    first_node: int,
) -> BudgetedLevel:
    """
    Shares `budget` children out among the nodes of the level above, before any is looked at: each of the `budget`
    largest log q of a (node, rank) pair, by path, counts one for its node. A node's first draws become its children,
    as many as it counts; among all these, the `num_chosen` most probable valid paths get children of their own.

    One launch on CUDA, where a row has no more than 8,192 pairs.

    Args:
        numbers (`torch.Tensor` of shape `[batch, above]`, int64): numbers of the nodes above in the tree.
        path_log_q (`torch.Tensor` of shape `[batch, above]`, float32): log q of the paths to the nodes above.
        valid (`torch.Tensor` of shape `[batch, above]`, bool): whether these count.
        best, drawn, drawn_log_q (`torch.Tensor` of shape `[batch, above, ranks]`): results of `draw_children`: log q
            of the best tokens, falling; the drawn tokens, and log q of these, -inf where there is none.
        budget (`int`): nodes of the level, at most `above * ranks`.
        num_chosen (`int`): nodes that get children, at most `budget`; of equals the first.
        first_node (`int`): number of the level's first node.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together.
    """
    check_shape("best", best, None, None, None)
    batch, above, ranks = best.shape
    for name, tensor, dtype in (
        ("numbers", numbers, torch.int64),
        ("path_log_q", path_log_q, torch.float32),
        ("valid", valid, torch.bool),
        ("best", best, torch.float32),
        ("drawn", drawn, torch.int64),
        ("drawn_log_q", drawn_log_q, torch.float32),
    ):
        shape = (batch, above) if name in ("numbers", "path_log_q", "valid") else best.shape
        check(name, tensor, best.device, (dtype,), *shape)
    if not 0 < num_chosen <= budget <= above * ranks:
        raise ValueError(
            f"`num_chosen` is {num_chosen} and `budget` {budget}; they must be from 1 on, in this order, and at most "
            f"{above * ranks}."
        )
    nodes, chosen = drawn.new_empty(3, batch, budget), drawn.new_empty(4, batch, num_chosen)
    level = BudgetedLevel(
        nodes[0],
        valid.new_empty(batch, budget),
        nodes[1],
        chosen[0],
        best.new_empty(batch, num_chosen),
        chosen[1],
        valid.new_empty(batch, num_chosen),
        chosen[2],
    )
    ops.share_out(numbers, path_log_q, valid, best, drawn, drawn_log_q, budget, num_chosen, first_node, *level)
    return level


register(share_out_naive, results=RESULTS, suits=lambda *arguments: arguments[3][0].numel() <= MOST_PAIRS)
