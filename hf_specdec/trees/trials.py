"""Trials of kinds of steps that have not been timed enough: at first no tree, and the drafter's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .whole_times import Tree, WholeTimes


class Trials:
    """
    Says which kinds of steps are yet to be timed: steps without a tree, with the tree to begin with, and with any
    other one that has a first time. (Steps without a tree come first: behind others a head would have to read more
    features than fit into a step with a tree, which takes a graph of its own.)

    Args:
        first (`TokenTree` or `DynamicTree`, *optional*): the tree to begin with.
        times (`WholeTimes`): what was timed.
    """

    ENOUGH = 3
    """Timed steps of a kind that are enough."""
    MOST_STEPS = 9
    """Most steps of a kind. (The first one of a call and the one of a capture are not timed.)"""
    FEW_DRAFTS, MOST_OF_FIRST = 12, 16
    """
    Drafts that are too few to judge the first tree of the first call, and most steps with it: on bad luck of a few
    rows the text would go on without a tree, while features pile up that a head must read before it drafts again.
    """
    USUAL_NODES = 8
    """Nodes of the tree to begin with, where there is no first one, or it is too large."""

    def __init__(self, first: Tree | None, times: WholeTimes):
        self._first, self._times = first, times
        self._steps: Counter[Tree | None] = Counter()

    def begins_with(self, allowed: Sequence[Tree]) -> list[Tree | None]:
        """The kinds of steps to begin with, among trees that are allowed."""
        if self._first is not None and self._first in allowed:
            return [None, self._first]
        usual = sorted(allowed, key=lambda tree: (abs(tree.num_nodes - self.USUAL_NODES), tree.depth))
        return [None, *usual[:1]]

    def due(self, allowed: Sequence[Tree], num_drafts: float) -> list[Tree | None]:
        """Kinds of steps that are yet to be timed, where the call has drafted as often as `num_drafts` says."""
        if self._times.are_complete:
            return []
        begin = self.begins_with(allowed)
        kinds = dict.fromkeys([*begin, *filter(self._times.has, allowed)])
        return [tree for tree in kinds if self._is_due(tree) or (tree in begin[1:] and self._is_new(tree, num_drafts))]

    def take(self, tree: Tree | None) -> list[Tree | None]:
        """The next steps, all with one tree (None: none), so that they are launched ahead as later ones are."""
        known = self._times.count(tree) % self.ENOUGH
        found = [tree] * (self.ENOUGH + 1 - known)
        self._steps.update(found)
        return found

    def _is_due(self, tree: Tree | None) -> bool:
        return self._times.count(tree) < self.ENOUGH and self._steps[tree] < self.MOST_STEPS

    def _is_new(self, tree: Tree | None, num_drafts: float) -> bool:
        return num_drafts < self.FEW_DRAFTS and 0 < self._steps[tree] < self.MOST_OF_FIRST
