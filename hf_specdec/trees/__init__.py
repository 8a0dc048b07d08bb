"""Token trees: static, dynamic, scheduled and automatically chosen ones, and the draft tree of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from .auto import AutoTree, times_of
from .auto_choice import AutoChoice
from .auto_learning import Remembered
from .choice import Evidence, ScheduledChoice, TreeChoice, TreeSchedule
from .draft_tree import DraftTree, Topology
from .dynamic import DynamicTree
from .text import tree_of_text
from .token_tree import MAX_NODES, TokenTree


__all__ = [
    "MAX_NODES",
    "AutoTree",
    "DraftTree",
    "DynamicTree",
    "Evidence",
    "Remembered",
    "TokenTree",
    "Topology",
    "Tree",
    "TreeChoice",
    "TreeSchedule",
    "as_tree",
    "choice_of",
    "remembered_of",
]

Tree = TokenTree | DynamicTree | AutoTree | TreeSchedule
"""The types into which `as_tree` reads a value of `tree=`."""


def as_tree(tree: Any) -> Tree:
    """
    Reads any value that `tree=` accepts: a string, a list of paths, a `TokenTree`, a `DynamicTree`, "auto", a schedule
    (a list of pairs of a length and a tree), or the saved form of one of these in a generation config.

    Raises:
        ValueError: if the value is not a valid tree.
        TypeError: if the value is of none of these kinds.
    """
    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, str):
        return tree_of_text(tree)
    if isinstance(tree, Mapping):
        if set(tree) == {"paths"}:
            return TokenTree(tree["paths"])
        if set(tree) == {"depth", "top_k", "num_nodes"}:
            return DynamicTree(**tree)
    elif isinstance(tree, (list, tuple)):
        return _as_schedule(tree) if any(map(_is_entry, tree)) else TokenTree(tree)
    raise TypeError(
        "`tree` must be a string, a list of rank paths, a `TokenTree`, a `DynamicTree`, 'auto', or a list of pairs of "
        f"a length and a tree, but is {type(tree).__name__}: {tree!r}."
    )


def _is_entry(entry: Any) -> bool:
    """Whether `entry` is an entry of a schedule and no rank path: its second part is a tree, or None."""
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and not isinstance(entry[1], int)


def _as_schedule(entries: Any) -> TreeSchedule:
    read = []
    for entry in entries:
        if not _is_entry(entry) or isinstance(entry[0], bool) or not isinstance(entry[0], int):
            raise ValueError(
                f"`tree` holds {entry!r}, which is no entry of a schedule. Write pairs of a length and a tree: "
                "[(0, '[(0,), (1,)]'), (512, '[(0,)]')]."
            )
        tree = None if entry[1] is None else as_tree(entry[1])
        if isinstance(tree, TreeSchedule):
            raise ValueError(f"`tree` holds a schedule within a schedule: {entry!r}. Give one list of pairs.")
        read.append((entry[0], tree))
    return TreeSchedule(tuple(read))


def choice_of(
    tree: Tree | None,
    target: Any,
    draft: Any,
    kind: Hashable,
    max_new_tokens: int | None = None,
    remembered: Remembered | None = None,
) -> TreeChoice:
    """
    The `TreeChoice` that says which tree each step of a call takes.

    Args:
        target, draft: models whose step times are remembered under "auto"; the drafter's type for a drafter without a
            model.
        kind (`Hashable`): key of steps that take equally long, e.g. the number of the call's rows.
        max_new_tokens (`int`, *optional*): most tokens that the texts get; None: any number.
        remembered (`Remembered`, *optional*): acceptance in earlier calls, see `remembered_of`.
    """
    if isinstance(tree, AutoTree):
        return AutoChoice(times_of(target, draft, kind), tree, max_new_tokens, remembered)
    if isinstance(tree, TreeSchedule):
        choices = [choice_of(entry, target, draft, kind, max_new_tokens, remembered) for _, entry in tree.entries]
        return ScheduledChoice(tree, choices)
    return TreeChoice(tree)


def remembered_of(target: Any, draft: Any, draws: bool) -> Remembered:
    """What all calls of one target and draft, sampled or greedy, remember of acceptance; see `times_of`."""
    remembered: Remembered = times_of(target, draft, ("acceptance", draws), Remembered)
    return remembered
