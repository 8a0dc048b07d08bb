"""Trees as text: how they are written on a command line, and how they are named in tables."""

from __future__ import annotations

from . import Tree, as_tree
from .dynamic import DynamicTree
from .token_tree import TokenTree


def parse_tree(text: str) -> Tree | None:
    """
    Parses a tree from the command line.

    Args:
        text (`str`): `default` (returns None: the draft's own tree), `auto`, rank paths such as
            `[(0,), (1,), (0, 0)]`, `chain:5`, `branching:4,2,1`, or `dynamic:5,4,16` (depth, children, nodes).

    Raises:
        ValueError: if the text has another form, or is no valid tree.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind == "default":
        return None
    if not colon:
        return as_tree(kind)
    try:
        numbers = [int(number) for number in rest.split(",")]
        if kind == "chain":
            (length,) = numbers
            return TokenTree.chain(length)
        if kind == "dynamic":
            depth, top_k, num_nodes = numbers
            return DynamicTree(depth=depth, top_k=top_k, num_nodes=num_nodes)
    except ValueError as error:
        if "`" in str(error):  # the error comes from the tree's constructor and names its argument
            raise
        raise _unreadable(text) from error
    if kind == "branching":
        return TokenTree.from_branching(numbers)
    raise _unreadable(text)


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"{text!r} is no tree. Write default, auto, rank paths such as '[(0,), (1,), (0, 0)]', chain:5, "
        "branching:4,2,1 or dynamic:5,4,16 (depth, children, nodes)."
    )


def shorten(tree: str, length: int = 28) -> str:
    """A tree's text for tables; a text longer than `length` is replaced by the tree's size, or cut."""
    if len(tree) <= length:
        return tree
    parsed = parse_tree(tree)
    return (
        f"of {parsed.num_nodes}, depth {parsed.depth}" if isinstance(parsed, TokenTree) else tree[: length - 1] + "…"
    )
