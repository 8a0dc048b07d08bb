"""Pauses, in which another thread has the models to itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class Pauses:
    """Who has asked a thread to rest, and whether it does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders: Counter[int] = Counter()
        self._rests = False

    @property
    def are_wanted(self) -> bool:
        """Whether the thread is to rest."""
        return bool(self._holders)

    @property
    def are_held_here(self) -> bool:
        """Whether the calling thread has asked for it."""
        return self._holders[threading.get_ident()] > 0

    def begin(self, wake: Callable[[], None], is_alive: Callable[[], bool]) -> None:
        """
        Waits until the thread rests.

        Args:
            wake (callable): lets the thread look whether it is to rest.
            is_alive (callable): whether it still can.

        Raises:
            RuntimeError: if it has ended instead.
        """
        with self._changed:
            self._holders[threading.get_ident()] += 1
        try:
            wake()
            with self._changed:
                while not self._rests and is_alive():
                    self._changed.wait(0.1)  # it may end without a word
                if not self._rests:
                    raise RuntimeError("`pause`: the manager has ended before it could pause.")
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Of the calling thread. When nobody else has asked, the other goes on."""
        with self._changed:
            self._holders[threading.get_ident()] -= 1
            self._holders = +self._holders
            self._changed.notify_all()

    def rest(self) -> None:
        """Called by the thread itself: returns when nobody wants it to rest any more."""
        with self._changed:
            self._rests = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._holders)
            self._rests = False
