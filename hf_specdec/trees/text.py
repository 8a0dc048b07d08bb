"""Trees as text: how they are written in a call and on a command line, and how they are named in tables."""

from __future__ import annotations

from .auto import AutoTree
from .dynamic import DynamicTree
from .token_tree import TokenTree, cut


def tree_of_text(text: str) -> TokenTree | DynamicTree | AutoTree:
    """
    Reads a tree from text.

    Args:
        text (`str`): `auto`, rank paths such as `[(0,), (1,), (0, 0)]`, `chain:5`, `branching:4,2,1`, or
            `dynamic:5,4,16` (depth, children, nodes).

    Raises:
        ValueError: if the text has another form, or is no valid tree.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind == "auto" and not colon:
        return AutoTree()
    if not colon:
        return TokenTree.parse(text)
    try:
        numbers = [int(number) for number in rest.split(",")]
    except ValueError as error:
        raise _unreadable(text) from error
    try:
        if kind == "chain" and len(numbers) == 1:
            return TokenTree.chain(*numbers)
        if kind == "branching":
            return TokenTree.from_branching(numbers)
        if kind == "dynamic" and len(numbers) == 3:
            depth, top_k, num_nodes = numbers
            return DynamicTree(depth=depth, top_k=top_k, num_nodes=num_nodes)
    except ValueError as error:
        raise ValueError(f"`tree`={text!r}: {error}") from error
    raise _unreadable(text)


def parse_tree(text: str) -> TokenTree | DynamicTree | AutoTree | None:
    """
    Reads a tree from the command line: as `tree_of_text`, or `default` for None, the draft's own tree.

    Raises:
        ValueError: if the text has another form, or is no valid tree.
    """
    return None if text.strip() == "default" else tree_of_text(text)


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"`tree`={cut(text)!r} is no tree. Write auto, rank paths such as '[(0,), (1,), (0, 0)]', chain:5, "
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
