"""Running captured steps: the parts of a step, its launches, and what the host takes from their reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...ranks import Ranks
from ...states.kernel import MOST_NODES
from ..request import Request
from .device_steps import DeviceSteps
from .grammars import has_grammar
from .outcome import Outcome
from .parts import DraftGroup, StepPart, parts_of
from .step import InFlightStep
from .walks import DRAWN_BY_NUMBERS


if TYPE_CHECKING:
    from ...drafters import Drafting
    from ..target import InFlightTarget

MOST_PARTS = 3
"""Most parts of a step, one for each tree that requests ask for. Every part is a forward of the target."""


class Repeats:
    """
    Further runs of a step that has been launched, for the same requests in the same rows. On the device the rows have
    moved on by the tokens of the run before; the host adds blocks for as many tokens as there may be.

    Args:
        part (`StepPart`): the only part of the step.
        step (`InFlightStep`): the captured step that runs it.
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
    """

    def __init__(self, part: StepPart, step: InFlightStep, target: InFlightTarget, drafting: Drafting):
        self.part, self.step = part, step
        self._target, self._drafting = target, drafting
        self._own = part.own
        self._most_new = step.rows.size.depth + 1
        self._num_slots = [1 if part.tree is None else drafting.num_slots(part.tree)] * len(part.drafted)
        self._num_slots += [1] * len(part.plain)
        assert part.wanted is not None  # since the step was loaded
        self.wanted = part.wanted
        # A grammar may take tokens of a step back.
        self.can_run = step.can_repeat and not self.wanted.kind.has_grammars
        """Whether the step can run again at all."""
        self.is_wanted = (step.kind, step.rows.size) == self.wanted
        """Whether the step has the kind and size of its rows, so that no other is to be captured for them."""
        draws_by_place = not self.wanted.kind.kinds.isdisjoint(DRAWN_BY_NUMBERS)
        self._needs_all = draws_by_place or self._most_new > target.cache.pool.block_size

    def may_run(self) -> bool:
        """
        Whether the step may run again for the requests that are left, while the others' rows rest. They must be taken
        out at once where the generator of the device draws for every place in the step, so that a seed gives the same
        text however many runs follow each other; and where tokens of the run in which they ended reach past the last
        column of their block tables.
        """
        return self.can_run and not (self._needs_all and any(request.is_over for request in self._own))

    def has_room(self) -> bool:
        """
        Whether there is room for the tokens of the next run, while one is on its way: in memory, in the step's size,
        and for pending features, which resting rows write, too.
        """
        store, plain = self._drafting.features, self.part.of(self.part.plain)
        if store is not None and max(store.counts(plain), default=0) + 2 * self._most_new > store.capacity:
            return False
        pool, most, ends = self._target.cache.pool, self.step.rows.size.blocks - 1, self._ends()
        missing = [pool.blocks_for(end) - len(one.table.blocks) for one, end in ends]
        needed = max((pool.blocks_for(end) for _, end in ends), default=0)
        return needed <= most and sum(max(count, 0) for count in missing) <= pool.num_free

    def _ends(self) -> list[tuple[Request, int]]:
        """The requests that are left, and the number of slots that each may have written to after the next run."""
        return [
            (one, min(one.length + self._most_new, one.max_length) + slots)
            for one, slots in zip(self._own, self._num_slots, strict=True)
            if not one.is_over
        ]

    def launch(self) -> None:
        """Starts the next run, for which there must be room; its blocks are reserved first."""
        for one, end in self._ends():
            self._target.cache.pool.reserve(one.table, end)
        self.step.load_changes(self._own, self.part.draft_temperature)
        self.part.load_calibration()
        self.step.launch()

    def count_drafts(self, outcome: Outcome) -> None:
        """Counts a run's drafts, with which rows go on that have been spoiled before; see `DraftBackoff`."""
        for row in self.part.drafted:
            if row not in outcome.left_out:
                self.part.requests[row].draft_backoff.takes_step()

    def leavers(self, outcome: Outcome) -> set[int]:
        """Rows of which nothing is taken from the run on its way, after the outcome of the run before it."""
        over = {row for row in self.part.rows if self.part.requests[row].is_over}
        return over | outcome.spoiled.keys() | outcome.left_out


class StepRunner:
    """
    Runs captured steps of requests.

    Args:
        steps (`DeviceSteps`): the engine's captured steps.
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
    """

    def __init__(self, steps: DeviceSteps, target: InFlightTarget, drafting: Drafting):
        self._steps, self._target, self._drafting = steps, target, drafting
        self._ranks = Ranks.of(target.model)

    def run(
        self, requests: list[Request], groups: Sequence[DraftGroup], goes_on: Callable[[], bool] = lambda: False
    ) -> Iterator[Outcome]:
        """
        Runs a captured step of all these requests, and yields its outcome. Yields nothing if the step cannot be
        captured; requests and draft are then unchanged, except that features of parts before one whose capture failed
        are zero. (That happens at most once, since a failure ends all captures. Drafts from them may be worse.)

        As long as `goes_on` agrees, the step is launched again for the same requests, each time before the run on its
        way has been read, and more outcomes follow: the device does not wait for the host. `goes_on` is called when
        the run on its way is the only one whose outcome has not been yielded and taken, and there are blocks for
        another; if it agrees, the step runs again. Until all outcomes have been taken, requests must keep their
        blocks.
        """
        parts = self._parts(requests, groups)
        if parts is None:
            return
        captures = self._steps.num_captures
        outcome, repeats, is_ahead = Outcome.of_rows(len(requests)), None, False
        for number, part in enumerate(parts):
            step = part.step = self._steps.loaded(part)
            if step is None:
                self._drop(parts[:number])
                return
            part.load_calibration()
            step.launch()
            outcome.launched_at = outcome.launched_at or step.launched_at
            if len(parts) == 1:
                repeats = Repeats(part, step, self._target, self._drafting)
                is_ahead = self._launch_ahead(repeats, goes_on)
            self._steps.deliver_results()  # earlier ones, while the device runs the step
            outcome.take(part)
        for part in parts:
            self._note(part, outcome)
        outcome.captured = captures != self._steps.num_captures
        yield outcome
        while repeats is not None and is_ahead:
            left_out = repeats.leavers(outcome)
            outcome = Outcome.of_rows(len(requests), left_out, repeats.step.launched_at)
            is_ahead = self._launch_ahead(repeats, goes_on)
            self._steps.deliver_results()
            outcome.take(repeats.part)
            self._note(repeats.part, outcome)
            repeats.count_drafts(outcome)
            yield outcome

    def _drop(self, parts: list[StepPart]) -> None:
        """Undoes what parts have done of which nothing is taken: their rows run again, without a captured step."""
        self._drop_features(parts)
        for part in parts:
            self._target.cache.drop_states([request.table for request in part.own])
            self._drafting.note_dropped(part.of(part.drafted))

    def _drop_features(self, parts: list[StepPart]) -> None:
        """Zeroes the new features, NaN perhaps, that these parts have written and of which nothing is taken."""
        if self._drafting.features is not None:
            for part in parts:
                read = {*part.drafted, *part.reading}
                for row in part.rows:  # those that were not read have new features after their waiting ones
                    self._drafting.features.wipe(part.requests[row], 0 if row in read else None)

    def _launch_ahead(self, repeats: Repeats, goes_on: Callable[[], bool]) -> bool:
        """Starts the next run of a step while one is on its way, if it can and may run. Returns whether it does."""
        if not repeats.may_run() or not (repeats.is_wanted or self._steps.stored.may_repeat(repeats.wanted)):
            return False
        if not repeats.has_room() or not goes_on():
            return False
        repeats.launch()
        return True

    def _parts(self, requests: list[Request], groups: Sequence[DraftGroup]) -> list[StepPart] | None:
        """The parts of a step of these requests; None if not all of them can be in captured steps."""
        cache, drafting = self._target.cache, self._drafting
        if not self._steps.works or not cache.has_memory:
            return None
        if any(request.options.device_warpers is None for request in requests):
            return None
        if (cache.state_layers or self._ranks.are_several) and has_grammar(requests):
            return None
        shifts = [request.position_shift for request in requests]
        if any(shift is not None and shift.dim() != 2 for shift in shifts):
            return None
        trees: list[Any] = [group.draft_request.plan.tree for group in groups]
        if not all(drafting.can_be_captured and drafting.can_grow(tree) for tree in trees):
            return None
        if cache.state_layers and any(tree.num_nodes >= MOST_NODES for tree in trees):
            return None
        parts = parts_of(requests, groups)
        return parts if len(parts) <= MOST_PARTS else None

    def _note(self, part: StepPart, outcome: Outcome) -> None:
        """Takes note of what the draft has read in a part's step."""
        if part.step is not None and part.step.features is not None:  # a copy: the next replay overwrites it
            outcome.features.append((part.rows, part.step.features[: len(part.rows)].clone()))
        read = [row for row in part.drafted + part.reading if row not in outcome.left_out]
        self._drafting.note_proposed(part.of(read))
        outcome.was_deferred |= part.was_deferred
        outcome.only_read |= bool(part.reading)
