"""Seconds that steps take on this machine, by their size: measured, smoothed, and then kept as they are."""

from __future__ import annotations

import math
import statistics
import threading
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from .dynamic import DynamicTree
from .token_tree import TokenTree


class Measured:
    """
    Seconds of one kind of step: the median of what was measured.

    Args:
        recent (`int`, *optional*): number of latest measurements that count; None: all.
    """

    LATELY, OFF = 7, 0.25
    """Latest measurements whose median, if it is off by more than this share, reopens one that is kept."""

    def __init__(self, recent: int | None = None):
        self._recent, self._is_first = recent, True
        self.seconds: list[float] = []
        self._lately: list[float] = []
        self.is_kept = False
        """Whether the median stays as it is, unless the machine has become faster or slower for good."""

    def add(self, seconds: float) -> bool:
        """
        Adds a measurement, and returns whether it changes anything. The very first one is dropped for the second, as
        it may include warming up.
        """
        if self.is_kept and not self._is_off(seconds):
            return False
        if self._recent is None and self._is_first and self.seconds:
            self.seconds, self._is_first = [], False
        self.seconds.append(seconds)
        if self._recent is not None:
            del self.seconds[: -self._recent]
        for name in ("median", "spread"):
            self.__dict__.pop(name, None)
        return True

    def _is_off(self, seconds: float) -> bool:
        """Whether the latest measurements say that what is kept holds no more; then they take its place."""
        self._lately.append(seconds)
        if len(self._lately) < self.LATELY:
            return False
        lately, self._lately = self._lately, []
        if abs(statistics.median(lately) - self.median) <= self.OFF * self.median:
            return False
        self.seconds, self.is_kept = lately[:-1], False
        return True

    @cached_property
    def median(self) -> float:
        """Median of the measurements: the mean of their middle half, which is less often off."""
        ranked = sorted(self.seconds)
        quarter = 1 if len(ranked) == 3 else len(ranked) // 4
        return statistics.fmean(ranked[quarter : len(ranked) - quarter])

    @cached_property
    def spread(self) -> float:
        """Relative spread of the measurements, as a standard deviation, from their median deviation."""
        median = self.median
        deviation = statistics.median(abs(seconds - median) for seconds in self.seconds)
        return 1.4826 * deviation / median if median > 0 else 0.0

    @property
    def may_include_warm_up(self) -> bool:
        """Whether there is one measurement only."""
        return self._recent is None and self._is_first


@dataclass(frozen=True)
class _Line:
    """
    A line through measured numbers.

    Args:
        start (`float`), slope (`float`): seconds at 0, and those that a number adds.
        noise (`float`): variance of a measurement, relative to the seconds.
        around (`float`): variance of numbers around the line, relative to the seconds.
    """

    start: float
    slope: float
    noise: float
    around: float

    @classmethod
    def through(cls, points: list[tuple[int, float, float]], spread: float, weight: float) -> _Line:
        """
        The line of least squares.

        Args:
            points (`list`): number, median seconds and number of measurements of each.
            spread (`float`): relative spread of a measurement.
            weight (`float`): weight of the line in measurements, where noise explains all deviations from it.
        """
        total = sum(count for _, _, count in points)
        middle = sum(count * number for number, _, count in points) / total
        mean = sum(count * seconds for _, seconds, count in points) / total
        width = sum(count * (number - middle) ** 2 for number, _, count in points)
        slope = max(
            sum(count * (number - middle) * (seconds - mean) for number, seconds, count in points) / width, 0.0
        )
        line, noise = cls(mean - slope * middle, slope, 0.0, 0.0), max(spread, 0.01) ** 2
        of_some = [point for point in points if point[1] > 0]  # drafting may take no time that is seen
        off = sum(count * (line.at(number) / seconds - 1.0) ** 2 for number, seconds, count in of_some)
        # By noise alone `off` would be about its variance for each point beyond the two that a line takes.
        beyond = max(off - noise * (len(points) - 2), 0.0) / total
        return cls(line.start, slope, noise, noise / weight + beyond)

    def at(self, number: int) -> float:
        """Seconds at a number, 0 at least."""
        return max(self.start + self.slope * number, 0.0)

    def share(self, count: float) -> float:
        """Weight of a number's own median of `count` measurements beside the line, from 0 to 1."""
        return self.around / (self.around + self.noise / count)


class TimeTable:
    """
    Seconds by a whole number (a depth, or a number of nodes), measured for some and interpolated for others.

    Args:
        recent (`int`, *optional*): number of latest measurements of a number that count. By default all count, until
            their median is known to `ENOUGH` or there are `MOST`: from then on it is kept as it is, so that what
            follows from it is the same in every later call, unless the machine becomes faster or slower for good.
    """

    RECENT = 7
    """Usual value of `recent`."""
    ENOUGH = 0.02
    """Relative standard error of a median from which on it is kept."""
    FEWEST, MOST = 5, 256
    """Fewest measurements of a median that is kept; most measurements that are taken."""
    SPREAD, WEIGHT = 0.1, 3.0
    """Relative spread of measurements that is assumed at first, and its weight in measurements."""
    LINE, FEWEST_OF_LINE = 4.0, 4
    """
    Weight, in measurements, of the line through all numbers beside one of them, and fewest numbers of a line. It
    weighs less, the farther numbers are from the line beyond what noise explains.
    """
    WARMING_UP = 0.3
    """Relative error of a number's only measurement."""

    def __init__(self, recent: int | None = None) -> None:
        self._recent = recent
        self._measured: dict[int, Measured] = {}
        self._lock = threading.Lock()  # calls in other threads measure meanwhile
        self._known: dict[bool, list[tuple[int, float]]] = {}

    def add(self, number: int, seconds: float) -> None:
        """Adds a measurement."""
        with self._lock:
            measured = self._measured.setdefault(number, Measured(self._recent))
            if not measured.add(seconds):
                return
            self._known = {}
            if self._recent is None and len(measured.seconds) >= self.FEWEST:
                measured.is_kept = (
                    len(measured.seconds) >= self.MOST or self._error(measured, self._spread()) <= self.ENOUGH
                )

    def has(self, number: int) -> bool:
        """Whether `number` was measured."""
        return number in self._measured

    def is_sure(self, number: int) -> bool:
        """Whether `number` was measured more than once, so that no warming up counts."""
        return self.has(number) and not self._measured[number].may_include_warm_up

    @property
    def largest(self) -> int:
        """The largest number that was measured, -1 if none was."""
        return max(list(self._measured), default=-1)

    def up_to(self, number: int, at_best: bool = False) -> list[float]:
        """
        Expected seconds for 0 … `number`, which never fall: interpolated linearly between measured numbers, constant
        before the first, and extrapolated beyond the last with the mean slope of the upper half. Zeros if nothing was
        measured.

        Args:
            at_best (`bool`): lowers every measured number by its standard error, so that what was measured seldom is
                measured again before it is given up.
        """
        with self._lock:
            if at_best not in self._known:
                self._known[at_best] = self._rising(at_best)
            known = self._known[at_best]
        if not known:
            return [0.0] * (number + 1)
        (first, start), (last, end) = known[0], known[-1]
        half, below = max((pair for pair in known if 2 * pair[0] <= last), default=known[0])
        slope = (end - below) / (last - half) if last > half else 0.0
        expected = [start] * (first + 1)
        for (low, start), (high, end) in pairwise(known):
            expected += [start + (end - start) * (place - low) / (high - low) for place in range(low + 1, high + 1)]
        expected += [end + slope * (place - last) for place in range(last + 1, number + 1)]
        return expected[: number + 1]

    def _rising(self, at_best: bool) -> list[tuple[int, float]]:
        """Pairs of a measured number and its seconds; neighbours that would fall get their common mean."""
        runs: list[tuple[list[int], float, float]] = []  # numbers, mean seconds, weight
        spread, line = self._spread(), self._line()
        for number, measured in sorted(self._measured.items()):
            seconds, weight = measured.median, float(len(measured.seconds))
            if number > 0 and line is not None:
                share = line.share(weight)
                seconds = share * seconds + (1.0 - share) * line.at(number)
            if at_best and not measured.is_kept:
                seconds *= 1.0 - min(self._error(measured, spread), 0.5)
            runs.append(([number], seconds, weight))
            while len(runs) > 1 and runs[-2][1] > runs[-1][1]:
                (after, late, its), (before, early, weight) = runs.pop(), runs.pop()
                runs.append(([*before, *after], (late * its + early * weight) / (its + weight), its + weight))
        return [(number, seconds) for numbers, seconds, _ in runs for number in numbers]

    def _line(self) -> _Line | None:
        """The line through all numbers from 1 on; None if there are too few to say."""
        points = [
            (number, its.median, float(len(its.seconds))) for number, its in self._measured.items() if number > 0
        ]
        return None if len(points) < self.FEWEST_OF_LINE else _Line.through(points, self._spread(), self.LINE)

    def _error(self, measured: Measured, spread: float) -> float:
        """Relative standard error of a median."""
        if measured.may_include_warm_up:
            return self.WARMING_UP
        return 1.2533 * spread / math.sqrt(len(measured.seconds))

    def _spread(self) -> float:
        """Relative spread of a measurement: that of all numbers, since it is the machine's."""
        total, weight = self.SPREAD * self.WEIGHT, self.WEIGHT
        for one in self._measured.values():
            if len(one.seconds) > 2:
                total, weight = total + one.spread * len(one.seconds), weight + len(one.seconds)
        return total / weight


@dataclass
class StepTimes:
    """
    Seconds that steps take on this machine, as measured by all calls of one target with one draft, dtype and number of
    rows.

    Args:
        propose (`TimeTable`): seconds of drafting a static tree, by its depth.
        rest (`TimeTable`): seconds of the rest of the step, by the number of draft nodes.
        dynamic (`dict`): seconds of drafting a dynamic tree, at key 0 of a table for each.
    """

    propose: TimeTable = field(default_factory=TimeTable)
    rest: TimeTable = field(default_factory=TimeTable)
    dynamic: dict[DynamicTree, TimeTable] = field(default_factory=dict)

    @property
    def are_known(self) -> bool:
        """
        Whether steps both with and without a tree were measured; with one kind alone, the other's time would be
        extrapolated from it.
        """
        return self.rest.has(0) and self.rest.largest > 0 and self.propose.largest > 0

    def of(self, tree: TokenTree | DynamicTree | None, at_best: bool = False) -> float:
        """Expected seconds of a step with `tree` (None: without a tree); see `TimeTable.up_to`."""
        return self.drafting(tree, at_best) + self.rest.up_to(0 if tree is None else tree.num_nodes, at_best)[-1]

    def drafting(self, tree: TokenTree | DynamicTree | None, at_best: bool = False) -> float:
        """Expected seconds of drafting `tree`."""
        if tree is None:
            return 0.0
        if isinstance(tree, DynamicTree) and tree in self.dynamic:
            return self.dynamic[tree].up_to(0, at_best)[-1]
        return self.propose.up_to(tree.depth, at_best)[-1]

    def add(
        self, tree: TokenTree | DynamicTree | None, depth: int, num_nodes: int, propose: float | None, rest: float
    ) -> None:
        """
        Adds a step.

        Args:
            tree (`TokenTree` or `DynamicTree`, *optional*): the tree that was asked for.
            depth (`int`), num_nodes (`int`): size of the tree that was drafted, which may be smaller.
            propose (`float`, *optional*): seconds of drafting; None if they are no measure of it.
            rest (`float`): seconds of the rest of the step.
        """
        self.rest.add(num_nodes, rest)
        if propose is None:
            return
        if isinstance(tree, DynamicTree) and num_nodes > 0:
            self.dynamic.setdefault(tree, TimeTable()).add(0, propose)
        else:
            self.propose.add(depth, propose)
