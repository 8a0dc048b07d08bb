"""Times of whole steps with each of a few trees, under a changing load."""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

from .dynamic import DynamicTree
from .step_times import TimeTable
from .token_tree import TokenTree


Tree = TokenTree | DynamicTree


class WholeTimes:
    """
    Seconds of steps with each tree: the median of the tree's first times (as of warming up), times a load factor. The
    load slows all steps, by a factor that is known best for the tree in use: the factor of all steps is mixed with
    the tree's own, and counts the more, the fewer and older the tree's recent times are.
    """

    FIRST = 3
    """Number of first times of a tree, whose median is the tree's reference."""
    BELIEF = 1.0
    """Weight of the load factor of all steps, in number of times of the tree itself."""
    OLD = 64
    """Age in steps beyond which a tree's recent times are old: the next time replaces them."""
    HALF_LIFE = 1024
    """Steps in which a tree's recent times lose half their weight."""
    REACH = 3
    """Times the nodes of the largest timed tree that an untimed one may have."""

    def __init__(self) -> None:
        self.are_of_whole_steps = False
        """
        Whether the times are those of steps run whole on the device; until the first of these, they are those of other
        steps.
        """
        self.are_complete = False
        """Whether every tree that is worth a capture has been timed, as after a warm-up."""
        self.owed: dict[Tree | None, float] = {}
        """Seconds that steps without a capture of a tree have lost; see `CandidateChoice`."""
        self.spent = self.lost = 0.0
        """
        Seconds of all steps, and seconds that explorations took beyond planned steps for as many tokens. Both decay
        exponentially; see `CandidateChoice`.
        """
        self._clear()

    def _clear(self) -> None:
        self.steps = 0
        """Number of steps that were timed."""
        self.seconds = 0.0
        """Seconds of these."""
        self._first: dict[Tree | None, list[float]] = {}
        self._recent: dict[Tree | None, deque[tuple[int, float]]] = {}
        self._of_all: deque[float] = deque(maxlen=31)
        self._of_all_then: float | None = None
        self._best: dict[Tree | None, float] = {}
        self._expected: dict[Tree | None, float] = {}
        """What `of` has found since the last step."""
        self._parts: tuple[float, float, float] | None = None
        """What a tree adds to a plain step: once, for a level and for a node; None if that is yet to be computed."""

    @property
    def are_known(self) -> bool:
        """Whether steps both with and without a tree were timed."""
        return None in self._first and len(self._first) > 1

    @property
    def reach(self) -> int:
        """Largest number of nodes for which the time of an untimed tree is estimated; 0 if no tree was timed."""
        return self.REACH * max((tree.num_nodes for tree in self._first if tree is not None), default=0)

    def has(self, tree: Tree | None) -> bool:
        """Whether any step with `tree` (None: without a tree) was timed."""
        return tree in self._first

    def count(self, tree: Tree | None) -> int:
        """Number of first times of `tree` (None: without a tree), at most `FIRST`."""
        return len(self._first.get(tree, ()))

    def add(self, tree: Tree | None, seconds: float, is_whole: bool = True) -> None:
        """
        Adds the seconds of a step. The first step run whole on the device (`is_whole`) drops all other times, and
        later steps of other kinds are ignored, because whole steps are much faster.
        """
        if is_whole and not self.are_of_whole_steps:
            self._clear()
            self.are_of_whole_steps = True
        if not is_whole and self.are_of_whole_steps:
            return
        self.steps += 1
        self.seconds += seconds
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
        self._expected, self._parts = {}, None  # last, since other threads may ask meanwhile

    def of(self, tree: Tree | None) -> float:
        """Expected seconds of a step with `tree` (None: without a tree) under the present load."""
        known = self._expected
        found = known.get(tree)
        if found is None:
            found = known[tree] = self._timed(tree) if tree in self._first else self._estimated(tree)
        return found

    def _timed(self, tree: Tree | None) -> float:
        """Seconds of a step with a tree that was timed."""
        own, of_all = statistics.median(factor for _, factor in self._recent[tree]), statistics.median(self._of_all)
        age = self.steps - self._recent[tree][-1][0]
        weight = len(self._recent[tree]) * 0.5 ** (age / self.HALF_LIFE)
        factor = (weight * own + self.BELIEF * of_all) / (weight + self.BELIEF)
        return statistics.median(self._first[tree]) * factor

    def best_of(self, tree: Tree | None) -> float:
        """Fewest seconds that a step with `tree` has taken; the expected seconds if none was timed."""
        return self._best.get(tree, self.of(tree))

    def is_old(self, tree: Tree | None) -> bool:
        """Whether the last timed step with `tree`, if there was any, is more than `OLD` steps past."""
        return tree in self._recent and self.steps - self._recent[tree][-1][0] > self.OLD

    @property
    def slowed(self) -> float:
        """Factor by which all steps have slowed since a step without a tree was timed last."""
        return 1.0 if self._of_all_then is None else statistics.median(self._of_all) / self._of_all_then

    def _estimated(self, tree: Tree | None) -> float:
        """
        Seconds of an untimed step. A tree adds something to a plain step once, for every level and for every node:
        each a third of what the only timed tree adds.
        """
        known = [one for one in self._first if one is not None]
        if tree is None or None not in self._first or not known:
            return min((self.of(one) for one in self._first), default=0.0)
        plain = self.of(None)
        parts = self._parts
        if parts is None:
            shapes = np.array([[1.0, one.depth, one.num_nodes] for one in known])
            largest = shapes.max(axis=0)
            added = np.array([self.of(one) - plain for one in known])
            parts = self._parts = tuple((_least_parts(shapes / largest, added) / largest).tolist())
        once, of_level, of_node = parts
        return plain + once + of_level * tree.depth + of_node * tree.num_nodes


def _least_parts(shapes: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Parts `[3]`, none negative, whose sums by `shapes` (`[trees, 3]`) come nearest to `added` (`[trees]`)."""
    used, found = [0, 1, 2], np.zeros(3)
    while used:
        found[:] = 0.0
        found[used] = np.linalg.lstsq(shapes[:, used], added, rcond=None)[0]
        if found.min() >= 0.0:
            break
        used.remove(int(found.argmin()))
    return found if used else np.zeros(3)
