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
    """

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._chosen: dict[int, tuple[weakref.ref[Any], str]] = {}

    def of(self, names: Iterable[str]) -> dict[str, int]:
        """Open requests of some replicas."""
        return {name: self._open[name] for name in names}

    def choose(self, request: Any, name: str) -> None:
        """A request is to go to a replica; in place of the one chosen for it before, if there was one."""
        self.withdraw(request)
        key = id(request)
        self._chosen[key] = weakref.ref(request, lambda _: self._drop(key)), name
        self._open[name] += 1

    def withdraw(self, request: Any) -> None:
        """A request goes to no replica for now. One that is given up, and so garbage, is withdrawn by itself."""
        self._drop(id(request))

    def route(self, request: Any, name: str) -> None:
        """A request has arrived at a replica."""
        self.withdraw(request)
        self._open[name] += 1

    def complete(self, name: str) -> None:
        """A request of a replica has ended."""
        self._open[name] -= 1

    def forget(self, name: str) -> None:
        """A replica is no more."""
        for key in [key for key, (_, chosen) in self._chosen.items() if chosen == name]:
            del self._chosen[key]
        del self._open[name]

    def _drop(self, key: int) -> None:
        _, name = self._chosen.pop(key, (None, None))
        if name is not None:
            self._open[name] -= 1
