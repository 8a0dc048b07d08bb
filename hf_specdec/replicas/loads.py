"""Open requests of each replica, with those that have been given to one and not arrived."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any


class Loads:
    """
    Counts open requests by replica. A request counts from when a replica is chosen for it, since others are chosen
    before it arrives: of many that come at once all would go to the replica that was the idlest before.

    A request (`key`) may be refused by a replica that is full: Ray Serve then says that it has ended there, and a
    replica is chosen for it again. One that is given up, and so garbage, counts no longer.
    """

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._chosen: dict[str, tuple[weakref.ref[Any], str]] = {}
        self._at: dict[str, str] = {}
        self._ended: set[str] = set()
        """Requests of `_chosen` of which the end has come first."""

    def of(self, names: Iterable[str]) -> dict[str, int]:
        """Open requests of some replicas."""
        return {name: self._open[name] for name in names}

    def choose(self, key: str, request: Any, name: str) -> None:
        """A request, an object, is to go to a replica; in place of the one chosen for it before, if there was one."""
        self.withdraw(key)
        self._chosen[key] = weakref.ref(request, lambda _: self.withdraw(key)), name
        self._open[name] += 1

    def withdraw(self, key: str) -> None:
        """A request goes to no replica for now."""
        _, name = self._chosen.pop(key, (None, None))
        self._ended.discard(key)
        if name is not None:
            self._open[name] -= 1

    def route(self, key: str, name: str) -> None:
        """A request has arrived at a replica."""
        has_ended = key in self._ended
        self.withdraw(key)
        if not has_ended:
            self._at[key] = name
            self._open[name] += 1

    def complete(self, key: str, name: str) -> None:
        """A request of a replica has ended, or was refused by it."""
        if self._at.get(key) == name:
            del self._at[key]
            self._open[name] -= 1
        elif key in self._chosen:
            self._ended.add(key)

    def forget(self, name: str) -> None:
        """A replica is no more."""
        for key, (_, chosen) in list(self._chosen.items()):
            if chosen == name:
                self.withdraw(key)
        for key in [key for key, at in self._at.items() if at == name]:
            del self._at[key]
        del self._open[name]
