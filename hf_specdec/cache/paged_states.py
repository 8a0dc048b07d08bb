"""`StatesOfRequests`: which slot of a paged cache's states belongs to which request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .blocks import BlockTable
from .held_states import HoldsStates


if TYPE_CHECKING:
    from ..graphs.paged import PagedGraphs


class StatesOfRequests(HoldsStates):
    """The part of a `PagedCache` that has to do with states: every request that was seated has a slot of them."""

    tables: list[BlockTable]
    graphs: PagedGraphs | None
    _states_of: dict[BlockTable, int]
    """Slot of the states of every request that was seated."""
    _most_states: int
    """Most requests that have states at a time."""

    def seat_states(self, tables: list[BlockTable]) -> None:
        """Gives every request a row of the states; that of a new one is as before any token."""
        self._begin_states(tables)
        self.state_rows = torch.tensor(self.slots_of_rows(), dtype=torch.long, device=self.device)

    def _begin_states(self, tables: list[BlockTable]) -> None:
        """Gives requests without states a slot for them."""
        new = [table for table in tables if table not in self._states_of]
        taken = set(self._states_of.values())
        missing = len(new) + len(taken)
        if self.num_states is None or missing > self.num_states:
            self._grow_states(missing)
        free = (row for row in range(missing) if row not in taken)
        self._states_of |= dict(zip(new, free, strict=False))
        begun = [self._states_of[table] for table in new]
        for layer in self.state_layers:
            layer.begin_rows(begun, self.num_states or 0)
        if begun and self._pending_slots.intersection(begun):
            self._pending_slots -= frozenset(begun)
            self.pending_paths().forget(torch.tensor(begun, device=self.device))

    def _grow_states(self, missing: int) -> None:
        """Makes room for so many rows of the states; for all at once, if graphs keep their addresses."""
        self.flush(sorted(self._pending_slots))
        self._paths = None
        for layer in self.state_layers:
            layer.kernel_pending.clear()
        few = min(max(8, 2 * (self.num_states or 0)), self._most_states)
        self.num_states = max(missing, few if self.graphs is None else self._most_states)

    def slots_of_rows(self) -> list[int]:
        return [self._states_of[table] for table in self.tables]

    def note_states(self, tables: list[BlockTable]) -> list[int]:
        """The slots of requests' states, for a captured step that leaves nodes of theirs pending."""
        if self.state_layers:
            self._begin_states(tables)
        slots = [self._states_of[table] for table in tables] if self.state_layers else []
        self._pending_slots |= frozenset(slots)
        return slots

    def drop_states(self, tables: list[BlockTable]) -> None:
        """Keeps nothing of the last step of some requests, whose result is not taken."""
        if self.state_layers:
            slots = torch.tensor([self._states_of[table] for table in tables], device=self.device)
            self.pending_paths().forget(slots)

    def limit_states(self, table: BlockTable, count: int) -> None:
        """Keeps no more than `count` nodes of a request's last step, root included: its text has ended there."""
        if self.state_layers:
            slot = torch.tensor([self._states_of[table]], device=self.device)
            self.pending_paths().limit(slot, count)
