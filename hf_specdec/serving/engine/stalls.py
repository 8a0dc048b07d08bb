"""Whether the engine's forwards end, as the HTTP server knows: a step that hangs can tell nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from .messages import Pulse


class Stalls:
    """
    Notes the signs that the engine gives of its forwards.

    Args:
        clock (`Callable`): the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last = clock()
        self._pulse = Pulse((), False)

    def note_work(self) -> None:
        """Notes that there is work after a time without any."""
        self._last, self._pulse = self._clock(), Pulse((), False)

    def note_forward(self) -> None:
        """Notes that a forward has ended."""
        self._last = self._clock()

    def note_pulse(self, pulse: Pulse) -> None:
        """Notes a pulse, which tells whether a forward has ended since the last one."""
        if pulse.is_preparing or pulse != self._pulse:
            self._last = self._clock()
        self._pulse = pulse

    @property
    def seconds(self) -> float:
        """
        Seconds since a forward has ended, or work has come; 0 while the engine compiles or captures. Means something
        only while there is work.
        """
        return 0.0 if self._pulse.is_preparing else self._clock() - self._last
