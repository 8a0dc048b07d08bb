"""Pauses of the manager's thread, in which other threads may use the models."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class Pauses:
    """The threads that hold a pause of the manager's thread, and whether that thread has paused."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders: Counter[threading.Thread] = Counter()
        self._rests = False

    @property
    def are_wanted(self) -> bool:
        """Whether any thread holds a pause, so that the manager's thread is to pause."""
        return bool(self._holders)

    @property
    def are_held_here(self) -> bool:
        """Whether the calling thread holds a pause."""
        return self._holders[threading.current_thread()] > 0

    def begin(self, wake: Callable[[], None], is_alive: Callable[[], bool]) -> threading.Thread:
        """
        Begins a pause, held by the calling thread, and waits until the manager's thread has paused. Returns the
        holder, for `end`.

        Args:
            wake (`Callable`): wakes the manager's thread, which then checks `are_wanted`.
            is_alive (`Callable`): returns whether the manager's thread is alive.

        Raises:
            RuntimeError: if the manager's thread has ended instead.
        """
        holder = threading.current_thread()
        with self._changed:
            self._holders[holder] += 1
        try:
            wake()
            with self._changed:
                while not self._rests and is_alive():
                    self._changed.wait(0.1)  # may end without notifying
                if not self._rests:
                    raise RuntimeError("`pause`: the manager has ended before it could pause.")
        except BaseException:
            self.end(holder)
            raise
        return holder

    def end(self, holder: threading.Thread) -> None:
        """Ends a pause of a thread, which may be another. After the last pause, the manager's thread continues."""
        with self._changed:
            self._holders[holder] -= 1
            self._holders = +self._holders
            self._changed.notify_all()

    def rest(self) -> None:
        """Called by the manager's thread: announces that it has paused, and waits until no pause is held."""
        with self._changed:
            self._rests = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._holders)
            finally:  # Ctrl-C, where requests run in the main thread
                self._rests = False
