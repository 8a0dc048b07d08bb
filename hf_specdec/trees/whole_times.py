"""How long steps take that are timed as a whole, with each of a few trees, under a load that changes."""

from __future__ import annotations

import statistics
from collections import deque

from .auto import StepTimes
from .auto_tables import TimeTable
from .token_tree import TokenTree


FEW_NODES = 4
"""So many are checked in the time of a root alone."""


class WholeTimes:
    """
    Seconds that steps take with each tree. The first times of a tree, as of warming up, are its own for good; the load
    makes all steps slower, by a factor that is known best of what is in use. It is believed of the others, too, the
    more the fewer and older the times that say how much slower these are.
    """

    FIRST = 3
    """Times that are a tree's own, of which the median counts."""
    BELIEF = 1.0
    """How many times of a tree the factor of all steps counts for."""
    OLD = 64
    """Steps after which a time is worth another look: the next one counts without it."""
    HALF_LIFE = 1024
    """Steps in which a time loses half its weight."""

    def __init__(self) -> None:
        self.are_of_whole_steps = False
        """Whether they are those of steps that the device does as a whole; before the first of these, of others."""
        self._clear()

    def _clear(self) -> None:
        self.steps = 0
        """Steps that were timed."""
        self._first: dict[TokenTree | None, list[float]] = {}
        self._recent: dict[TokenTree | None, deque[tuple[int, float]]] = {}
        self._of_all: deque[float] = deque(maxlen=31)
        self._of_all_then: float | None = None
        self._best: dict[TokenTree | None, float] = {}
        self._likely = StepTimes()

    @property
    def are_known(self) -> bool:
        """Whether steps with and without a tree were timed: else the one would be judged by the other."""
        return self._likely.are_known

    @property
    def reach(self) -> int:
        """Most nodes of trees of which it can be told what is likely."""
        return max(2 * self._likely.rest.largest, 4)

    def has(self, tree: TokenTree | None) -> bool:
        """Whether any step with it was timed."""
        return tree in self._first

    def add(self, tree: TokenTree | None, seconds: float, is_whole: bool = True) -> None:
        """Adds what a step has taken: those that the device does as a whole are so much faster that they go alone."""
        if is_whole and not self.are_of_whole_steps:
            self._clear()
            self.are_of_whole_steps = True
        if not is_whole and self.are_of_whole_steps:
            return
        self.steps += 1
        first = self._first.setdefault(tree, [])
        if len(first) < self.FIRST:
            first.append(seconds)
        factor = seconds / statistics.median(first)
        if self.is_old(tree):
            self._recent[tree].clear()
        self._recent.setdefault(tree, deque(maxlen=TimeTable.RECENT)).append((self.steps, factor))
        self._of_all.append(factor)
        if tree is None:
            self._of_all_then = statistics.median(self._of_all)
        self._best[tree] = min(self._best.get(tree, seconds), seconds)
        self._learn_what_is_likely(tree, seconds)

    def of(self, tree: TokenTree | None) -> float:
        """What a step with it takes at present."""
        if tree not in self._first:
            return self._likely.of(tree)
        own, of_all = statistics.median(factor for _, factor in self._recent[tree]), statistics.median(self._of_all)
        age = self.steps - self._recent[tree][-1][0]
        weight = len(self._recent[tree]) * 0.5 ** (age / self.HALF_LIFE)
        factor = (weight * own + self.BELIEF * of_all) / (weight + self.BELIEF)
        return statistics.median(self._first[tree]) * factor

    def best_of(self, tree: TokenTree | None) -> float:
        """The least that a step with it has taken."""
        return self._best.get(tree, self.of(tree))

    def is_old(self, tree: TokenTree | None) -> bool:
        """Whether the last step with it, if there was any, is long past."""
        return tree in self._recent and self.steps - self._recent[tree][-1][0] > self.OLD

    @property
    def slowed(self) -> float:
        """How many times as long all steps take as when one without a tree was timed last."""
        return 1.0 if self._of_all_then is None else statistics.median(self._of_all) / self._of_all_then

    def _learn_what_is_likely(self, tree: TokenTree | None, seconds: float) -> None:
        """
        With few nodes drafting is what a step takes more than one without a tree; with more it is what is known of the
        depth.
        """
        propose, rest = self._likely.propose, self._likely.rest
        if tree is None:
            propose.add(0, 0.0)
            rest.add(0, seconds)
        elif tree.num_nodes <= FEW_NODES and rest.has(0):
            checking = rest.up_to(tree.num_nodes)[-1]
            propose.add(tree.depth, max(seconds - checking, 0.0))
            rest.add(tree.num_nodes, checking)
        else:
            drafting = propose.up_to(tree.depth)[-1] if propose.has(0) else 0.0
            rest.add(tree.num_nodes, max(seconds - drafting, 0.0))
