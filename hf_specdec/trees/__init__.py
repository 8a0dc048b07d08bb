"""What a drafter is asked to fill: a static tree, or the limits within which one is grown each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .draft_tree import DraftTree, Topology
from .dynamic import DynamicTree
from .token_tree import MAX_NODES, TokenTree


__all__ = ["MAX_NODES", "DraftTree", "DynamicTree", "TokenTree", "Topology", "as_tree"]


def as_tree(tree: Any) -> TokenTree | DynamicTree:
    """
    Reads any value that `tree=` accepts: a string, a list of paths, a `TokenTree`, a `DynamicTree`, or the dict that
    one of these becomes in a saved generation config.

    Raises:
        ValueError: if the value is not a valid tree.
        TypeError: if it is none of these kinds.
    """
    if isinstance(tree, (TokenTree, DynamicTree)):
        return tree
    if tree == "auto":
        raise ValueError(
            "`tree`='auto': this version chooses no trees. Give one such as '[(0,), (1,), (0, 0)]', or leave it out."
        )
    if isinstance(tree, str):
        return TokenTree.parse(tree)
    if isinstance(tree, Mapping):
        if set(tree) == {"paths"}:
            return TokenTree(tree["paths"])
        if set(tree) == {"depth", "top_k", "num_nodes"}:
            return DynamicTree(**tree)
    elif isinstance(tree, (list, tuple)):
        return TokenTree(tree)
    raise TypeError(
        "`tree` must be a string, a list of rank paths, a `TokenTree` or a `DynamicTree`, but is "
        f"{type(tree).__name__}: {tree!r}."
    )
