"""Prefill chunks by captured steps: which are captured, and what their rows are loaded with."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ...cache.pending_features import PendingFeatures
from ...verification import Verifier
from ..request import Request
from .keys import PromptKey, StepSize
from .log_probabilities import best_asked
from .processing import processing_of
from .prompt_step import PromptReport, PromptStep
from .staged_rows import RowValues
from .stored import CapturedPrompts


if TYPE_CHECKING:
    from ...drafters import Drafting
    from ..scheduler import Chunk
    from ..target import InFlightTarget
    from .device_steps import DeviceSteps

ALL_KINDS = frozenset({Verifier.GREEDY, Verifier.FROM_TARGET})
"""
Kinds of walks in prefill steps, so that one graph serves all requests: a walk at a root costs little. Those of
requests that draw by position have `POSITION_KINDS`, which leave torch's generator alone; either serve greedy ones.
"""
POSITION_KINDS = frozenset({Verifier.GREEDY, Verifier.BY_POSITION})


class DevicePrompts:
    """
    Runs prefill chunks by captured steps. A step is captured when its size comes for the second time, or at once.

    Args:
        steps (`DeviceSteps`): the engine's decoding steps; if their capture fails, prefill is not captured either.
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
    """

    def __init__(self, steps: DeviceSteps, target: InFlightTarget, drafting: Drafting):
        # No reference cycle: K/V must be freed with the manager.
        self._decoding_steps: DeviceSteps = weakref.proxy(steps)
        self._target, self._drafting = target, drafting
        self.stored = CapturedPrompts()
        """The captured prefill steps."""
        self._failed = False
        self.are_ahead = False
        """Whether steps are captured before prompts come, which are read by the next larger one, or without."""
        self.captures_at_once = False
        """Whether the first prompt of a size waits for the capture, so that no later one does."""
        self.draws_tokens = True
        """
        Whether captured steps draw the first token of sampled requests. They draw by other random numbers than the
        host, so that a seed gives another text where a prompt of its size is the first, and read without a graph.
        """

    def give_up(self) -> None:
        """Drops captured prefill steps and captures no more."""
        self._failed = True
        self.stored.clear()

    def launch(self, chunk: Chunk, widths: tuple[int, ...]) -> PromptReport | None:
        """
        Starts a captured prefill of a chunk. Returns its report; None, with nothing changed, if the chunk must be read
        without a captured step.

        Args:
            chunk (`Chunk`): the scheduler's chunk.
            widths (`tuple[int, …]`): chunk widths in tokens for which there may be graphs.
        """
        if chunk.width not in widths:
            return None
        size = StepSize.of(chunk.requests, 0, chunk.width + 1, self._decoding_steps.fewest_blocks)
        needs = best_asked(chunk.requests), processing_of(chunk.requests)
        keys = [PromptKey(size, kinds, *needs) for kinds in kinds_for(chunk.requests)]
        if self.are_ahead:
            keys = [self.stored.chosen(key) for key in keys]
        key = next((one for one in keys if one in self.stored), keys[0])
        is_due = key in self.stored
        if (own := key._replace(size=size)) not in self.stored:
            count = self.stored.count(own)
            is_due |= not self.are_ahead and (self.captures_at_once or count > 1)
        if not is_due or not all(self.can_read(request) for request in chunk.requests):
            return None
        step = self.stored.get(key)
        cache = self._target.cache
        tables = [request.table for request in chunk.requests]
        ends = [cache.length_of(table) + count for table, count in zip(tables, chunk.counts, strict=True)]
        is_new = step is None
        if step is None:
            step = self._new_step(key)
        values = self._values(chunk, ends)
        step.load(chunk.requests, *values)
        if is_new:
            step.rows.keep_nothing()  # a capture may run the step, more than once
            if not self._decoding_steps.capture(step):
                return None
            step.load(chunk.requests, *values)
            self.stored.add(key, step)
        report = step.launch()
        for table, end in zip(tables, ends, strict=True):
            cache.note_length(table, end)
        self._drafting.note_read(chunk.requests, ends)
        return report

    def _new_step(self, key: PromptKey, may_compile: bool = True) -> PromptStep:
        steps, has_head = self._decoding_steps, self._target.features is not None
        # As a whole it is not worth it, for few prompts of every length.
        compiles = may_compile and steps.compiles and not steps.compiles_whole
        return PromptStep(self._target, self._drafting, key.size, has_head, compiles, *key[1:])

    def capture_ahead(self, key: PromptKey) -> None:
        """Captures a step before prompts come. Raises whatever keeps it from being captured."""
        step = self._resting(self._new_step(key))
        self._decoding_steps.record(step)
        self.stored.add(key, step)

    def compile_kernels(self, key: PromptKey) -> None:
        """Begins to compile the kernels of a step, see `StepAhead.compile_kernels`."""
        self._decoding_steps.compile_kernels(self._resting(self._new_step(key, may_compile=False)))

    def _resting(self, step: PromptStep) -> PromptStep:
        """A step with nothing but rows that rest."""
        step.load([], RowValues.empty(), [])
        step.rows.keep_nothing()
        return step

    def can_read(self, request: Request) -> bool:
        """Whether captured steps can do all that prefill of a request needs."""
        target, drafting = self._target, self._drafting
        if self._failed or not self._decoding_steps.works or not target.cache.has_memory:
            return False
        if (
            target.cache.state_layers
            or not target.forward.takes_logits_to_keep
            or request.options.device_warpers is None
            or request.options.grammar is not None  # the host chooses its first token
        ):
            return False
        if request.options.do_sample and not self.draws_tokens:
            return False
        return target.features is None or (drafting.features is not None and drafting.can_be_captured)

    def _values(self, chunk: Chunk, ends: list[int]) -> tuple[RowValues, list[int]]:
        """Values of a chunk's rows, and the place in its text where each row begins; see `InFlightRows.load`."""
        requests, counts, store = chunk.requests, chunk.counts, self._drafting.features
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        begins = [end == request.length for request, end in zip(requests, ends, strict=True)]
        kinds = [
            request.options.verifier(False) if begin else Verifier.RESTS
            for request, begin in zip(requests, begins, strict=True)
        ]
        slots, places = [0] * len(requests), [PendingFeatures.DUMMY] * len(requests)
        if store is not None:
            speculates = [request.options.plan is not None for request in requests]
            of_requests = zip(requests, speculates, strict=True)
            places = [store.place(one) if own else PendingFeatures.DUMMY for one, own in of_requests]
            slots = [
                store.first_slot(place) if own and begin else store.trash_slot
                for place, own, begin in zip(places, speculates, begins, strict=True)
            ]
        nothing = [0] * len(requests)
        values = RowValues(
            kinds,
            room=nothing,
            counts=counts,
            draft_slots=[-1] * len(requests),
            places=places,
            slots=slots,
            slot_steps=nothing,
            draft_temperature=[1.0] * len(requests),
        )
        return values, starts


def kinds_for(requests: list[Request]) -> list[frozenset[Verifier]]:
    """The kinds of walks that serve the rows of a chunk, the first of which is captured if there is none."""
    wanted = frozenset(request.options.verifier(False) for request in requests)
    return [kinds for kinds in (ALL_KINDS, POSITION_KINDS) if wanted <= kinds] or [ALL_KINDS | POSITION_KINDS]
