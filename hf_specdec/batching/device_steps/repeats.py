"""Further runs of a captured step, each launched before the host has read the run before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..request import Request
from ..waiting_features import WaitingFeatures
from .parts import Outcome, StepPart
from .step import InFlightStep


if TYPE_CHECKING:
    from ..drafting import Drafting
    from ..target import InFlightTarget


class Repeats:
    """
    Further runs of a step that has been launched, for the same requests in the same rows. On the device the rows have
    moved on by the tokens of the run before; the host adds blocks for as many tokens as there may be.

    Args:
        requests (`list[Request]`): the requests of the step.
        part (`StepPart`): the only part of the step.
        step (`InFlightStep`): the step.
        target (`InFlightTarget`), drafting (`Drafting`): the engine's target and draft.
    """

    def __init__(
        self,
        requests: list[Request],
        part: StepPart,
        step: InFlightStep,
        target: InFlightTarget,
        drafting: Drafting,
    ):
        self.part, self.step = part, step
        self._requests, self._target, self._drafting = requests, target, drafting
        self._own = [requests[row] for row in part.rows]
        self._most_new = step.rows.size.depth + 1
        draws = [one.options.seed is not None and one.options.do_sample for one in self._own]
        self._can_repeat = step.can_repeat and not any(draws)  # the host loads a seed's numbers by position

    def launch(self) -> bool:
        """
        Starts the next run while one is on its way. Returns False, with nothing started, if the step cannot run again
        without the host, or if there is no room for the tokens.
        """
        if not self._can_repeat or not self._have_room():
            return False
        for cache in (self._target.cache, self._drafting.cache):
            if cache is not None:
                cache.clean([one.table for one in self._own])
        self.step.rows.load_blocks(self._own)
        self.step.launch()
        for row in self.part.drafted:
            self._requests[row].draft_backoff.takes_step()
        return True

    def _have_room(self) -> bool:
        """Whether there are blocks, in the step's size, and places for features. Reserves the blocks."""
        part, store = self.part, self._drafting.features
        plain = [self._requests[row] for row in part.plain]
        if store is not None and max(store.counts(plain), default=0) + 2 * self._most_new > WaitingFeatures.CAPACITY:
            return False
        num_slots = 1 if part.tree is None else part.tree.num_slots
        pool, most = self._target.cache.pool, self.step.rows.size.blocks - 1
        ends = [one.length + self._most_new + num_slots for one in self._own]
        return max(map(pool.blocks_for, ends)) <= most and all(map(pool.reserve, [o.table for o in self._own], ends))

    def leavers(self, outcome: Outcome) -> set[int]:
        """Rows of which nothing is taken from the run on its way, after the outcome of the run before it."""
        over = {row for row in self.part.rows if self._requests[row].is_over}
        return over | outcome.spoiled.keys() | outcome.left_out
