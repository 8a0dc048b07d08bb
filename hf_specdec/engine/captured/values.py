"""What a captured step is loaded with, besides tokens and blocks: what the draft reads, and where features go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cache.pending_features import PendingFeatures
from ..request import Request
from .parts import StepPart
from .staged_rows import RowValues


if TYPE_CHECKING:
    from ...drafters import Drafting

MOST_LAG, SURE_LAG = 8, 4
"""Most levels of an earlier, deeper tree that a draft can catch up with in a step: of few rows, and of any number."""
MOST_READ = 128
"""Most tokens of all rows that a draft reads in every step for the sake of earlier, deeper trees."""


class ValuesOfRows:
    """
    Makes the `RowValues` of the parts of a step.

    Args:
        drafting (`Drafting`): the engine's draft, which catches up before the step where the step cannot.
    """

    def __init__(self, drafting: Drafting):
        self._drafting = drafting

    def of(self, part: StepPart, read_width: int, size: int) -> tuple[int, RowValues]:
        """
        Most unread tokens per row that the draft reads in the part's step, and the values of its rows. Where an EAGLE
        head must read before it can draft, the part drafts nothing in this step (`StepPart.defer`).

        Args:
            read_width (`int`): least width at which heads read in every step; 0: they read when they have to.
            size (`int`): number of rows of the captured step, which stays as rows come and go.
        """
        lag, waits = self.lag_of(part, size), self._waiting(part)
        if self._reads_first(part, lag, waits, read_width):
            part.defer([row for row, count in zip(part.rows, waits, strict=True) if count > 0])
            store = self._drafting.features
            assert store is not None  # features wait in it
            lag = store.width_for(max(read_width, *waits))
        return lag, self._row_values(part, lag, waits)

    def _row_values(self, part: StepPart, lag: int, waits: list[int]) -> RowValues:
        """Values of the part's rows. The draft catches up with rows of more than `lag` unread tokens first."""
        own, drafted = part.own, part.of(part.drafted)
        read = set(part.drafted + part.reading)
        readers = part.of([row for row in part.rows if row in read])
        self._drafting.catch_up(readers, lag)
        lags = dict(zip(readers, self._drafting.lags(readers) if readers else [], strict=True))
        cache = self._drafting.cache
        states = [] if cache is None else cache.note_states([one.table for one in readers])
        state_slots = dict(zip(readers, states, strict=False))
        places, slots = self._features_of(own, lags, waits, part.depth + 1)
        slot_step = 0 if self._drafting.features is None else self._drafting.features.slot_step
        return RowValues(
            kinds=[one.options.verifier(part.draws and place < len(drafted)) for place, one in enumerate(own)],
            room=[self._drafting.room(one) for one in drafted] + [0] * len(part.plain),
            counts=[lags.get(one, 1) for one in own],
            draft_slots=[state_slots.get(one, -1) for one in own],
            places=places,
            slots=slots,
            slot_steps=[0 if one in lags or one.options.plan is None else slot_step for one in own],
            draft_temperature=part.draft_temperature,
        )

    def lag_of(self, part: StepPart, size: int) -> int:
        """Most unread tokens per row, root included, that the draft reads in a step with the part's tree."""
        # An earlier tree of the request may have been deeper, as with a schedule.
        plans = [request.options.plan for request in part.of(part.drafted)]
        deepest = max([part.depth, *(plan.tree.depth for plan in plans if plan is not None)])
        most = min(max(MOST_READ // size, SURE_LAG), MOST_LAG)
        return 1 + max(part.depth, min(deepest, most))

    def _waiting(self, part: StepPart) -> list[int]:
        """Number of pending features of each of the part's rows; 0 without an EAGLE head."""
        store = self._drafting.features
        return [0] * len(part.rows) if store is None else store.counts(part.own)

    def _reads_first(self, part: StepPart, lag: int, waits: list[int], read_width: int) -> bool:
        """Whether an EAGLE head must read before it can draft, or because a row has no room for more features."""
        most, store = max(waits), self._drafting.features
        if most == 0 or store is None or not self._drafting.can_be_captured:
            return False
        is_too_far = max(waits[: len(part.drafted)], default=0) > lag
        is_full = not part.groups and most == store.capacity
        return is_too_far or is_full or read_width > 0

    def _features_of(
        self, own: list[Request], lags: dict[Request, int], waits: list[int], new: int
    ) -> tuple[list[int], list[int]]:
        """
        Places of the rows' pending features, and first slots for `new` more: after features that are not read in this
        step. `lags` has the requests all of whose features are read in it; `waits` has the number of pending features
        of each row.
        """
        store, places = self._drafting.features, [PendingFeatures.DUMMY] * len(own)
        if store is None:
            return places, [0] * len(own)
        slots = [store.trash_slot] * len(own)
        if max(waits) + new > store.capacity:
            self._drafting.make_room([one for one in own if one not in lags], new)
            waits = store.counts(own)
        for row, (one, count) in enumerate(zip(own, waits, strict=True)):
            if one.options.plan is not None:
                waiting = 0 if one in lags else count
                assert waiting + new <= store.capacity
                places[row] = store.place(one)
                slots[row] = store.first_slot(places[row]) + waiting
        return places, slots
