"""The captured steps that there are, and which of them runs rows of a kind and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .rows import StepSize
    from .step import InFlightStep, StepKind

MOST_STEPS = 512
"""Most captured steps that are kept; the least recently used is dropped first."""
MOST_SEEN = 1024
"""Most pairs of kind and size whose occurrences are counted."""
PATIENCE = 256
"""
Occurrences of a size after which it gets a graph of its own, even if a larger one can run it. (A capture takes as long
as some fifty steps, and a step in a graph with a third more rows a few percent longer.)
"""
LARGEST_DETOUR = 4
"""Most times the needed rows and blocks that a larger graph may have to stand in for one of the right size."""


class CapturedSteps:
    """Captured decoding steps by kind and size. Iterates over the pairs of kind and size."""

    def __init__(self) -> None:
        self._steps: dict[tuple[StepKind, StepSize], InFlightStep] = {}
        self._seen: Counter[tuple[StepKind, StepSize]] = Counter()
        self._patience = PATIENCE

    def __iter__(self) -> Iterator[tuple[StepKind, StepSize]]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    @contextmanager
    def capturing_every_size(self) -> Iterator[None]:
        """A context in which every size gets a graph of its own, and no larger graph stands in for it."""
        self._patience = 0
        try:
            yield
        finally:
            self._patience = PATIENCE

    def chosen(self, kind: StepKind, wanted: StepSize) -> tuple[StepKind, StepSize]:
        """
        Kind and size of the step that is to run rows of a kind that want a size: these, or those of a captured step
        with room for more that stands in until the rows' own size has come `PATIENCE` times.
        """
        if (kind, wanted) in self._steps or not self._may_stand_in(kind, wanted):
            return kind, wanted
        kinds = kind.done_by
        able = [
            (other_kind, other)
            for other_kind, other in self._steps
            if other_kind in kinds
            and wanted.lag <= other.lag
            and wanted.rows <= other.rows <= LARGEST_DETOUR * wanted.rows
            and wanted.blocks <= other.blocks <= LARGEST_DETOUR * wanted.blocks
        ]
        if not able:
            return kind, wanted
        return min(able, key=lambda one: (one[1].rows, one[1].blocks, one[1].lag, one[0] != kind))

    def may_repeat(self, wanted: tuple[StepKind, StepSize]) -> bool:
        """
        Whether rows that want this kind and size may stay in the graph that runs them: their own, or a larger one as
        long as that may stand in.
        """
        return wanted in self._steps or self._may_stand_in(*wanted)

    def _may_stand_in(self, kind: StepKind, wanted: StepSize) -> bool:
        """Counts an occurrence of a size without a graph. Returns whether a larger graph may still run it."""
        if len(self._seen) > MOST_SEEN:
            self._seen.clear()
        self._seen[kind, wanted] += 1
        return self._seen[kind, wanted] < self._patience

    def get(self, kind: StepKind, size: StepSize) -> InFlightStep | None:
        """The step of a kind and size, which is now the most recently used one; None if there is none."""
        step = self._steps.pop((kind, size), None)
        if step is not None:
            self._steps[kind, size] = step
        return step

    def add(self, kind: StepKind, size: StepSize, step: InFlightStep) -> None:
        """Keeps a captured step. Drops the least recently used ones if there are too many."""
        self._steps[kind, size] = step
        while len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]

    def clear(self) -> None:
        """Drops all steps and counts."""
        self._steps.clear()
        self._seen.clear()
