"""Kernels of captured steps by phase: empty kernels, marks, tell in the trace of a profiler where a phase begins."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from hf_specdec.cache.compaction import Compaction
from hf_specdec.drafters import block
from hf_specdec.drafters.growth import pairs, positions
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.captured.walks import RowWalks
from hf_specdec.forwards.tree_forward import TreeForward


MARK, FIRST_MARK = "_phase_mark", "_first_phase_mark"
"""Kernels that begin a phase; the first one of a step has a name of its own."""
REST = "rest"
PHASES: list[tuple[Any, str, str]] = [
    (block.BlockDrafter, "forward_features", "features' K/V"),
    (block.BlockDrafter, "begin_tree", "block"),
    (block.BlockDrafter, "logits", "lm_head"),
    (block, "pairs_of", "pairs"),
    (block, "grow_from_pairs", "growth"),
    (block, "grow_from_positions", "growth"),
    (pairs, "best_tokens", "candidates"),
    (positions, "best_tokens", "candidates"),
    (RowWalks, "walk", "walk"),
    (Compaction, "__call__", "commit"),
]
"""What runs in each phase: owner, name, and phase."""


class Phase(NamedTuple):
    """What a step does in a phase: launches, microseconds in kernels, and microseconds from its begin to its end."""

    launches: float
    in_kernels: float
    elapsed: float


class PhaseMarks:
    """
    The marks of steps that are captured inside the context `set`.

    Args:
        mark (`Callable`): launches the empty kernel of this name, `MARK` or `FIRST_MARK`.
    """

    def __init__(self, mark: Callable[[str], object]):
        self._mark, self._open, self._names = mark, list[str](), list[str]()
        self.of_steps: dict[int, list[str]] = {}
        """The phases that the marks of a step begin, in order, of kinds of steps by their number of marks."""

    @contextmanager
    def set(self) -> Iterator[None]:
        """A context in which steps are captured with marks."""
        with ExitStack() as patches:
            for owner, name, phase in PHASES:
                patches.enter_context(patch.object(owner, name, self._marked(getattr(owner, name), phase)))
            verify = self._marked(TreeForward.__call__, "verify", is_of=lambda: self._open[-1] == REST)
            patches.enter_context(patch.object(TreeForward, "__call__", verify))
            patches.enter_context(patch.object(InFlightStep, "_run", self._step(InFlightStep._run)))
            yield

    def _step(self, run: Callable) -> Callable:
        @functools.wraps(run)
        def marked(*args: Any) -> Any:
            self._names = []
            with self._phase(REST):
                found = run(*args)
            self.of_steps[len(self._names)] = self._names
            return found

        return marked

    def _marked(self, function: Callable, phase: str, is_of: Callable[[], bool] = lambda: True) -> Callable:
        @functools.wraps(function)
        def marked(*args: Any, **options: Any) -> Any:
            if not self._open or not is_of():
                return function(*args, **options)
            with self._phase(phase):
                return function(*args, **options)

        return marked

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self._open.append(phase)
        self._begin(phase)
        yield
        self._open.pop()
        self._begin(self._open[-1] if self._open else "between steps")

    def _begin(self, phase: str) -> None:
        self._mark(MARK if self._names else FIRST_MARK)
        self._names.append(phase)


def phases_of(kernels: list[tuple[str, float, float]], marks: dict[int, list[str]]) -> dict[str, Phase]:
    """
    Averages over the steps of a trace, of the kind of which there are most.

    Args:
        kernels (`list`): name, begin and end of the kernels that ran, in microseconds.
        marks (`dict[int, list[str]]`): see `PhaseMarks.of_steps`.

    Raises:
        ValueError: if the trace has no step with such marks.
    """
    steps: list[list[list[tuple[str, float, float]]]] = []  # of every step what begins with each of its marks
    for kernel in sorted(kernels, key=lambda kernel: kernel[1]):
        if kernel[0].startswith(FIRST_MARK):
            steps.append([])
        if steps and kernel[0].startswith((MARK, FIRST_MARK)):
            steps[-1].append([])
        if steps:
            steps[-1][-1].append(kernel)
    numbers = Counter(len(step) for step in steps if len(step) in marks)
    if not numbers:
        raise ValueError(f"The trace has no step with {' or '.join(map(str, marks))} marks.")
    [(number, count)] = numbers.most_common(1)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in (step for step in steps if len(step) == number):
        for phase, (mark, *own), following in zip(marks[number], step, step[1:], strict=False):
            added = len(own), sum(end - begin for _, begin, end in own), following[0][1] - mark[2]
            totals[phase] = [total + one for total, one in zip(totals[phase], added, strict=True)]
    return {phase: Phase(*(value / count for value in total)) for phase, total in totals.items()}


def profiled_phases(call: Callable[[], object], marks: dict[int, list[str]]) -> dict[str, Phase]:
    """The phases of the steps that a call replays, which were captured with these marks."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    ]
    return phases_of(kernels, marks)


def table_of(phases: dict[str, Phase]) -> str:
    """The phases as lines of text, in the order of the step, and their sum."""
    total = Phase(*(sum(column) for column in zip(*phases.values(), strict=True)))
    lines = [f"  {'phase':<16}{'launches':>10}{'us in kernels':>15}{'us elapsed':>12}"]
    for name, phase in {**phases, "step": total}.items():
        lines.append(f"  {name:<16}{phase.launches:>10.1f}{phase.in_kernels:>15.1f}{phase.elapsed:>12.1f}")
    return "\n".join(lines)
