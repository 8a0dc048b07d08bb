"""The trees that requests ask for: each its own, the entry of a schedule, or "auto"."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..trees import AutoTree, DynamicTree, TokenTree, TreeSchedule
from .request import Request


def wanted_tree(request: Request) -> Any:
    """The tree, or "auto", that a request asks for at its present length; None if it does not speculate."""
    tree = None if request.options.plan is None else request.options.plan.tree
    if not isinstance(tree, TreeSchedule):
        return tree
    return [entry for start, entry in tree.entries if start <= request.length][-1]


def shared(wanted: list[Any]) -> list[Any]:
    """The trees that requests ask for, with one "auto" for those that draw and those that do not."""
    greedy = {tree for tree in wanted if isinstance(tree, AutoTree) and not tree.takes_either}
    if not greedy:
        return wanted
    plain = [replace(tree, takes_either=False) if isinstance(tree, AutoTree) else tree for tree in wanted]
    return [other if other in greedy else tree for tree, other in zip(wanted, plain, strict=True)]


def may_change(request: Request) -> bool:
    """Whether a schedule has another tree for a longer text of the request."""
    tree = None if request.options.plan is None else request.options.plan.tree
    return isinstance(tree, TreeSchedule) and request.length < tree.entries[-1][0]


@lru_cache(maxsize=256)
def within(tree: TokenTree | DynamicTree, num_nodes: int) -> TokenTree | DynamicTree | None:
    """A tree cut to `num_nodes`: the first nodes of a static tree in level order, or a smaller dynamic tree."""
    if num_nodes == 0 or tree.num_nodes <= num_nodes:
        return tree if num_nodes else None
    if isinstance(tree, DynamicTree):
        return DynamicTree(depth=tree.depth, top_k=tree.top_k, num_nodes=num_nodes)
    return TokenTree(tree.paths[:num_nodes])
