"""Measurements of `tree="auto"`: how often draft tokens are accepted, and how long steps take."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

from .draft_tree import DraftTree
from .token_tree import TokenTree


class AcceptanceTable:
    """
    Acceptance probability of the child of rank r at depth d, given an accepted parent, as running averages.

    Args:
        max_depth (`int`), max_children (`int`): number of depths and of ranks that are counted.
    """

    FIRST_GUESS = (0.6, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)
    """Prior acceptance probability by rank, of the order that the papers of EAGLE and SpecInfer report."""
    WEIGHT = 4.0
    """Weight, in drafts, of the prior, and of a rank's average over all depths in the estimate for one depth."""
    DECAY = 0.97
    """Factor by which earlier counts shrink at every step."""

    def __init__(self, max_depth: int, max_children: int):
        depths, ranks = range(max_depth), range(max_children)
        self._hits = [[0.0 for _ in ranks] for _ in depths]
        self._trials = [[0.0 for _ in ranks] for _ in depths]
        self._guess = [self.FIRST_GUESS[min(rank, len(self.FIRST_GUESS) - 1)] for rank in ranks]

    def add(self, draft: DraftTree, paths: list[list[int] | None]) -> None:
        """
        Counts one step: at every node reached, which of its drafted children was accepted. Places where the drafter
        proposed nothing count neither as accepted nor as rejected.
        """
        self._grow_older()
        for number, path in enumerate(paths):
            if path is not None:
                self._add_path(path, partial(_drafted_children, draft, number))

    def add_whole(self, tree: TokenTree, paths: list[list[int] | None]) -> None:
        """
        Counts one step in which every row drafted all nodes of `tree`; `paths` holds the accepted nodes per row (None:
        rested).
        """
        self._grow_older()
        children = tree.children
        for path, times in Counter(tuple(path) for path in paths if path is not None).items():
            self._add_path(path, children.__getitem__, times)

    def _grow_older(self) -> None:
        for table in (self._hits, self._trials):
            for row in table:
                row[:] = [self.DECAY * count for count in row]

    def _add_path(self, path: Sequence[int], children_of: Callable[[int], Sequence[int]], times: int = 1) -> None:
        steps = zip([0, *path], [*path, None], strict=True)
        for trials, hits, (node, accepted) in zip(self._trials, self._hits, steps, strict=False):
            for rank, child in enumerate(children_of(node)[: len(trials)]):
                trials[rank] += times
                hits[rank] += times * (child == accepted)

    def chances(self) -> list[list[float]]:
        """
        Acceptance probabilities `[depth][rank]`, not rising with the rank; rarely seen entries lean on other depths of
        the rank.
        """
        table, weight = [], self.WEIGHT
        over_depths = [
            (sum(hits) + weight * guess) / (sum(trials) + weight)
            for hits, trials, guess in zip(
                zip(*self._hits, strict=True), zip(*self._trials, strict=True), self._guess, strict=True
            )
        ]
        for hits, trials in zip(self._hits, self._trials, strict=True):
            chances, least, left = [], 1.0, 1.0
            for hit, trial, elsewhere in zip(hits, trials, over_depths, strict=True):
                least = min(least, (hit + weight * elsewhere) / (trial + weight), left)
                left -= least  # at most one child of a node is accepted
                chances.append(least)
            table.append(chances)
        return table


def _drafted_children(draft: DraftTree, row: int, node: int) -> list[int]:
    tokens = draft.tokens_list[row]
    return [child for child in draft.topology.children_of(row, node) if tokens[child - 1] >= 0]


class TimeTable:
    """Seconds by a whole number (a depth, or a number of nodes), measured for some and interpolated for others."""

    RECENT = 7
    """Number of latest measurements of which the median counts."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}

    def add(self, number: int, seconds: float) -> None:
        """Adds a measurement."""
        self._recent.setdefault(number, deque(maxlen=self.RECENT)).append(seconds)

    def has(self, number: int) -> bool:
        """Whether `number` was measured."""
        return number in self._recent

    @property
    def largest(self) -> int:
        """The largest number that was measured, -1 if none was."""
        return max(self._recent, default=-1)

    def up_to(self, number: int) -> list[float]:
        """
        Expected seconds for 0 … `number`: interpolated linearly between measured numbers, constant before the first,
        and extrapolated beyond the last with the mean slope of all measurements (at least 0). Zeros if nothing was
        measured.
        """
        if not self._recent:
            return [0.0] * (number + 1)
        # Copies, since calls in other threads add measurements meanwhile.
        known = sorted((key, statistics.median(list(values))) for key, values in list(self._recent.items()))
        (first, start), (last, end) = known[0], known[-1]
        slope = max(end - start, 0.0) / (last - first) if last > first else 0.0
        expected = [start] * (first + 1)
        for (low, start), (high, end) in pairwise(known):
            expected += [start + (end - start) * (place - low) / (high - low) for place in range(low + 1, high + 1)]
        expected += [end + slope * (place - last) for place in range(last + 1, number + 1)]
        return expected[: number + 1]


def likeliest_paths(chances: list[list[float]], num_nodes: int, depth: int) -> list[tuple[float, tuple[int, ...]]]:
    """The `num_nodes` likeliest rank paths of at most `depth` levels, with their chances, the likeliest first."""
    found: list[tuple[float, tuple[int, ...]]] = []
    queue: list[tuple[float, tuple[int, ...]]] = [(-chances[0][0], (0,))]
    while queue and len(found) < num_nodes:
        negative, path = heapq.heappop(queue)
        found.append((-negative, path))
        level, rank = len(path) - 1, path[-1]
        if rank + 1 < len(chances[level]) and chances[level][rank] > 0:
            sibling = negative / chances[level][rank] * chances[level][rank + 1]
            heapq.heappush(queue, (sibling, (*path[:-1], rank + 1)))
        if level + 1 < depth:
            heapq.heappush(queue, (negative * chances[level + 1][0], (*path, 0)))
    return [(chance, path) for chance, path in found if chance > 0]


def expected_length(paths: Iterable[tuple[int, ...]], chances: list[list[float]]) -> float:
    """
    Expected tokens per step with a tree: 1 + the sum of its paths' probabilities; parents precede children in `paths`.
    """
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    expected = 1.0
    for path in paths:
        reached[path] = reached[path[:-1]] * chances[len(path) - 1][path[-1]]
        expected += reached[path]
    return expected
