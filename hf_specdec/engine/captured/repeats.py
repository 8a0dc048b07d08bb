"""Further runs of a captured step, each launched before the host has read the run before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .outcome import Outcome
from .parts import StepPart
from .step import InFlightStep


if TYPE_CHECKING:
    from ...drafters import Drafting
    from ..target import InFlightTarget


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

    def has_room(self) -> bool:
        """
        Whether there is room for the tokens of the next run, while one is on its way: in memory, in the step's size,
        and for pending features.
        """
        store, plain = self._drafting.features, self.part.of(self.part.plain)
        if store is not None and max(store.counts(plain), default=0) + 2 * self._most_new > store.capacity:
            return False
        pool, most, ends = self._target.cache.pool, self.step.rows.size.blocks - 1, self._ends()
        missing = [pool.blocks_for(end) - len(one.table.blocks) for one, end in zip(self._own, ends, strict=True)]
        return max(map(pool.blocks_for, ends)) <= most and sum(max(count, 0) for count in missing) <= pool.num_free

    def _ends(self) -> list[int]:
        """The number of slots that each row may have written to after the next run."""
        part = self.part
        of_tree = 1 if part.tree is None else self._drafting.num_slots(part.tree)
        num_slots = [of_tree] * len(part.drafted) + [1] * len(part.plain)
        return [
            min(one.length + self._most_new, one.max_length) + slots
            for one, slots in zip(self._own, num_slots, strict=True)
        ]

    def launch(self) -> None:
        """Starts the next run, for which there must be room; its blocks are reserved first."""
        for one, end in zip(self._own, self._ends(), strict=True):
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
