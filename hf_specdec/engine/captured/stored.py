"""The captured steps that there are, and which of them runs rows of a kind and size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import ClassVar, Generic, TypeVar

from .captured import CapturedStep
from .keys import PromptKey, StepKey, StepSize
from .prompt_step import PromptStep
from .step import InFlightStep


PATIENCE = 256
"""
Occurrences of a size after which it gets a graph of its own, even if a larger one can run it. (A capture takes as long
as some fifty steps, and a step in a graph with a third more rows a few percent longer.)
"""
LARGEST_DETOUR = 4
"""
Most times the needed rows and blocks that a larger graph may have to stand in for one of the right size. A step that
was compiled as a whole may have any number of blocks: a capture of another one takes half a minute.
"""


KeyT = TypeVar("KeyT", bound=Hashable)
StepT = TypeVar("StepT", bound=CapturedStep)


class KeptSteps(Generic[KeyT, StepT]):
    """Captured steps by what is fixed at their capture, and how often others have come. Iterates over the keys."""

    MOST: ClassVar[int]
    """Most steps that are kept; the least recently used is dropped first."""
    MOST_SEEN = 1024
    """Most keys whose occurrences are counted."""

    def __init__(self) -> None:
        self._steps: dict[KeyT, StepT] = {}
        self._seen: Counter[KeyT] = Counter()

    @property
    def wanted(self) -> list[tuple[int, KeyT]]:
        """Keys without a step, and how often they have come, the most frequent first."""
        found = [(number, key) for key, number in self._seen.items() if key not in self._steps]
        return sorted(found, key=lambda pair: -pair[0])

    def __contains__(self, key: KeyT) -> bool:
        return key in self._steps

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def count(self, key: KeyT) -> int:
        """Counts an occurrence of a key without a step. Returns how often it has come."""
        if len(self._seen) > self.MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key]

    def get(self, key: KeyT) -> StepT | None:
        """The step of a key, which is now the most recently used one; None if there is none."""
        step = self._steps.pop(key, None)
        if step is not None:
            self._steps[key] = step
        return step

    def add(self, key: KeyT, step: StepT) -> None:
        """
        Keeps a captured step. Drops the least recently used ones if there are too many, which are wanted again when
        they have come often once more.
        """
        self._steps[key] = step
        del self._seen[key]
        while len(self._steps) > self.MOST:
            del self._steps[next(iter(self._steps))]

    def clear(self) -> None:
        """Drops all steps and counts."""
        self._steps.clear()
        self._seen.clear()


class CapturedPrompts(KeptSteps[PromptKey, PromptStep]):
    """Captured prefill steps."""

    MOST = 64

    def chosen(self, wanted: PromptKey) -> PromptKey:
        """The captured step that is to read a chunk: its own, or the smallest with more room; itself without any."""
        size = wanted.size
        if wanted in self._steps:
            return wanted
        able = [
            key
            for key in self._steps
            if (key.size.lag, key.size.axes, *key[1:]) == (size.lag, size.axes, *wanted[1:])
            and key.size.rows >= size.rows
            and key.size.blocks >= size.blocks
        ]
        return min(able, key=lambda key: (key.size.rows, key.size.blocks), default=wanted)


class CapturedSteps(KeptSteps[StepKey, InFlightStep]):
    """Captured decoding steps, by kind and size."""

    MOST = 512

    def __init__(self) -> None:
        super().__init__()
        self._patience: float = PATIENCE
        self._detour: float = LARGEST_DETOUR
        self.are_ahead = False
        """Whether graphs are captured before they are needed; see `rely_on_larger`."""

    def capture_no_size_twice(self) -> None:
        """From now on, larger graphs stand in for ever: a call does not wait for a capture in its midst."""
        self._patience = math.inf

    def rely_on_larger(self) -> None:
        """From now on, any larger graph stands in for ever, and graphs of the right sizes are captured ahead."""
        self.are_ahead, self._patience, self._detour = True, math.inf, math.inf

    def chosen(self, wanted: StepKey) -> StepKey:
        """
        The step that is to run rows of a kind and size: their own, or a captured one with room for more that stands in
        until their own size has come `PATIENCE` times.
        """
        if wanted in self._steps or not self._may_stand_in(wanted):
            return wanted
        size = wanted.size
        most_blocks = math.inf if wanted.kind.compiles_whole else self._detour * size.blocks
        able = [
            key
            for key in self._steps
            if key.kind.stands_in_for(wanted.kind)
            and size.axes == key.size.axes
            and size.lag <= key.size.lag
            and size.rows <= key.size.rows <= self._detour * size.rows
            and size.blocks <= key.size.blocks <= most_blocks
        ]
        if not able:
            return wanted
        return min(able, key=lambda key: (key.size.rows, key.size.blocks, key.size.lag, key.kind != wanted.kind))

    def fitting(self, size: StepSize) -> list[StepKey]:
        """Captured steps that have room for as many rows and blocks, and stand in at least."""
        return [
            key
            for key in self._steps
            if size.axes == key.size.axes
            and size.rows <= key.size.rows <= self._detour * size.rows
            and size.blocks <= key.size.blocks <= self._detour * size.blocks
        ]

    def may_repeat(self, wanted: StepKey) -> bool:
        """
        Whether rows of this kind and size may stay in the graph that runs them: their own, or a larger one as long as
        that may stand in. Now and then they may not, so that the caller can capture their own graph between steps.
        """
        if wanted in self._steps:
            return True
        return self._may_stand_in(wanted) and not (self.are_ahead and self._seen[wanted] % PATIENCE == 0)

    def _may_stand_in(self, wanted: StepKey) -> bool:
        """Counts an occurrence of a key without a graph. Returns whether a larger graph may still run it."""
        return self.count(wanted) < self._patience
