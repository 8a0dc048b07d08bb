"""Trials of trees that may be worth a capture, in the first steps of an engine: afterwards nothing is captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from .auto_tables import expected_of
from .dynamic import DynamicTree
from .token_tree import TokenTree
from .whole_times import Tree, WholeTimes


class Trials:
    """
    Says which kinds of steps are yet to be timed: steps without a tree, with a few trees of different shapes, a
    dynamic one among them, and then with all that may be the best for some draft, by times estimated from the others.
    So the trees that are captured depend on the machine, and not on the text that comes first.

    Args:
        trees (`Sequence`): the trees to choose from.
        small (`TokenTree`): the tree of probes, which is always timed.
        times (`WholeTimes`): what was timed; complete once nothing is left to try.
        drafts (`Sequence`): acceptance tables `[depth][rank]` of the drafts that there may be.
    """

    ENOUGH = 3
    """Timed steps of a kind that are enough."""
    MOST_STEPS = 9
    """Most steps of a kind in a call. (The first one of a call and the one of a capture are not timed.)"""
    MARGIN = 0.95
    """Share of the best timed rate that an estimated one must reach."""
    FEW_NODES = 12
    """Most nodes of the trees that are timed first."""

    def __init__(
        self,
        trees: Sequence[Tree],
        small: TokenTree,
        times: WholeTimes,
        drafts: Sequence[list[list[float]]],
    ):
        self._trees, self._times, self._drafts = trees, times, drafts
        static = [tree for tree in trees if isinstance(tree, TokenTree)]
        dynamic = [tree for tree in trees if isinstance(tree, DynamicTree)][:1]
        few = [tree for tree in static if tree.num_nodes <= self.FEW_NODES] or [small]
        deep = max(few, key=lambda tree: (tree.depth, -tree.num_nodes))
        wide = max(few, key=lambda tree: (tree.num_nodes / tree.depth, tree.num_nodes))
        self._first = list(dict.fromkeys((None, small, deep, wide, *dynamic)))
        self._steps: Counter[Tree | None] = Counter()

    @property
    def are_over(self) -> bool:
        """Whether nothing is left to try, in this call or at all."""
        return not self._next()

    def take(self) -> list[Tree | None]:
        """The next steps, all of a kind, so that they are launched ahead as later ones are; none if all is tried."""
        found = self._next()
        for tree in found:
            found = [tree] * (self.ENOUGH + 1 - self._times.count(tree))
        self._steps.update(found)
        return found

    def _next(self) -> list[Tree | None]:
        if self._times.are_complete:
            return []
        begun = [tree for tree in self._trees if self._times.has(tree)]
        for tree in (*self._first, *begun):
            if self._may_step(tree):
                return [tree]
        if not all(map(self._times.has, self._first)):
            return []  # the next call may time them
        seconds_of = self._estimate([tree for tree in begun if isinstance(tree, TokenTree)])
        for tree in self._trees:
            if tree not in begun and self._may_step(tree) and self._is_promising(tree, seconds_of(tree), begun):
                return [tree]
        if not any(tree not in begun and self._steps[tree] for tree in self._trees):
            self._times.are_complete = True
            self._times.spent = self._times.lost = 0.0
        return []

    def _may_step(self, tree: Tree | None) -> bool:
        return self._times.count(tree) < self.ENOUGH and self._steps[tree] < self.MOST_STEPS

    def _is_promising(self, tree: Tree, seconds: float, others: list[Tree]) -> bool:
        for chances in self._drafts:
            rates = [expected_of(one, chances) / self._times.of(one) for one in others]
            best = max(1.0 / self._times.of(None), *rates)
            if expected_of(tree, chances) / seconds > self.MARGIN * best:
                return True
        return False

    def _estimate(self, timed: list[Tree]) -> Callable[[Tree], float]:
        """Seconds of a step with any tree: what it adds to a plain one once, for every level and for every node."""
        plain, used = self._times.of(None), [0, 1, 2]
        added = np.array([self._times.of(tree) - plain for tree in timed])
        shapes = np.array([[1.0, tree.depth, tree.num_nodes] for tree in timed])
        found = np.zeros(3)
        while used:
            found[:] = 0.0
            found[used] = np.linalg.lstsq(shapes[:, used], added, rcond=None)[0]
            if found.min() >= 0.0:
                break
            used.remove(int(found.argmin()))
        return lambda tree: plain + float(found @ (1.0, tree.depth, tree.num_nodes))
