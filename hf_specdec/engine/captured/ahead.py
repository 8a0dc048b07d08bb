"""Captures ahead of requests: steps of a kind and size, all of whose rows rest while they are captured."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...random_generators import draws_undone
from .keys import PromptKey, StepKey
from .staged_rows import RowValues
from .step import InFlightStep


if TYPE_CHECKING:
    from ...drafters import DraftRequest
    from .device_steps import DeviceSteps

TIMED = 3
"""Runs of a new step that are timed; see `WholeTimes.FIRST`."""


@dataclass(frozen=True)
class StepAhead:
    """
    A decoding step to capture.

    Args:
        key (`StepKey`): its kind and size.
        draft_request (`DraftRequest`, *optional*): how its trees are drafted; None without a tree.
        fewest (`int`): fewest rows that run in it before there are further graphs.
        is_timed (`bool`): whether its runs are timed, as for `tree="auto"`.
    """

    key: StepKey
    draft_request: DraftRequest | None = None
    fewest: int = 1
    is_timed: bool = False

    def is_there(self, steps: DeviceSteps) -> bool:
        """Whether it has been captured."""
        return self._key(steps) in steps.stored

    def capture(self, steps: DeviceSteps) -> list[float]:
        """
        Captures it. Returns the seconds of its first runs, if they are timed.

        Raises:
            Exception: whatever keeps it from being captured.
        """
        key = self._key(steps)
        step = self._loaded(steps, key)
        steps.record(step)
        steps.stored.add(key, step)
        if not self.is_timed:
            return []
        step.load([], RowValues.empty())
        with draws_undone(step.rows.device):
            return _seconds_of(step)

    def compile_kernels(self, steps: DeviceSteps) -> None:
        """Begins to compile its kernels, as far as those of layers that are compiled are not others."""
        key = self._key(steps)
        steps.compile_kernels(self._loaded(steps, key._replace(kind=replace(key.kind, compiles=False))))

    def _loaded(self, steps: DeviceSteps, key: StepKey) -> InFlightStep:
        """A step yet to be captured, all of whose rows rest."""
        step = steps.new_step(key, self.draft_request)
        step.load([], RowValues.empty())
        step.rows.keep_nothing()
        return step

    def _key(self, steps: DeviceSteps) -> StepKey:
        """The key with what holds now: compilation may have failed meanwhile."""
        return self.key._replace(kind=replace(self.key.kind, compiles=steps.compiles))


@dataclass(frozen=True)
class PromptsAhead:
    """
    A prefill step to capture.

    Args:
        key (`PromptKey`): what is fixed at its capture.
    """

    key: PromptKey

    def is_there(self, steps: DeviceSteps) -> bool:
        """Whether it has been captured."""
        return self.key in steps.prompts.stored

    def capture(self, steps: DeviceSteps) -> list[float]:
        """Captures it; see `StepAhead.capture`."""
        steps.prompts.capture_ahead(self.key)
        return []

    def compile_kernels(self, steps: DeviceSteps) -> None:
        """See `StepAhead.compile_kernels`."""
        steps.prompts.compile_kernels(self.key)


Ahead = StepAhead | PromptsAhead


def _seconds_of(step: InFlightStep) -> list[float]:
    """Seconds of some runs without requests, each launched before the one before is read, as steps are in flight."""
    found: list[float] = []
    step.launch()
    last: float | None = None
    for _ in range(TIMED + 1):
        step.launch()
        step.report()
        step.logprobs()
        now = time.perf_counter()
        if last is not None:
            found.append(now - last)
        last = now
    step.report()
    step.logprobs()
    return found
