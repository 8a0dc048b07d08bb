"""What requests bring forth, for those who wait for it in other threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from .request import SpeculativeGenerationOutput as Output


class Results:
    """Outputs in the order they came; those with a handler, or all if there is a listener, go to it instead."""

    def __init__(self) -> None:
        self.listener: Callable[[list[Output]], None] | None = None
        self._outputs: deque[Output] = deque()
        self._handlers: dict[str, tuple[Callable[[Output], None], asyncio.AbstractEventLoop]] = {}
        self._changed = threading.Condition()
        self._is_open = True

    def register(self, request_id: str, callback: Callable[[Output], None], loop: asyncio.AbstractEventLoop) -> None:
        """From now on `callback` is called in `loop` with the outputs of a request, those that are there included."""
        with self._changed:
            self._handlers[request_id] = callback, loop
            mine = [output for output in self._outputs if output.request_id == request_id]
            self._outputs = deque(output for output in self._outputs if output.request_id != request_id)
            self._call_handlers(mine)

    def unregister(self, request_id: str) -> None:
        """Forgets a handler."""
        with self._changed:
            self._handlers.pop(request_id, None)

    def deliver(self, outputs: Iterable[Output]) -> None:
        """
        Hands outputs to their handlers, or keeps them until somebody asks. (All of a step at once: who waits for them
        in another thread is woken once, and does not take turns with the next step for every one.)
        """
        with self._changed:  # all along, so that outputs stay in order
            if self.listener is not None:
                try:
                    self.listener(list(outputs))
                except BaseException:
                    self.listener = None  # not asked again
                    raise
                return
            self._outputs += self._call_handlers(outputs)
            self._changed.notify_all()

    def _call_handlers(self, outputs: Iterable[Output]) -> list[Output]:
        """Wakes each event loop once, however many of its handlers are called. Returns outputs that have none."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Output], None], Output]]] = {}
        left = []
        for output in outputs:
            name = output.request_id
            if name not in self._handlers:
                left.append(output)
                continue
            callback, loop = self._handlers.pop(name) if output.is_finished() else self._handlers[name]
            calls.setdefault(loop, []).append((callback, output))
        for loop, of_loop in calls.items():
            try:
                loop.call_soon_threadsafe(_call_soon, loop, of_loop)
            except RuntimeError:
                pass  # the loop is closed: nobody is left to be told
        return left

    def clear(self) -> None:
        """Forgets what nobody has asked for, and who was to be told."""
        with self._changed:
            self._outputs.clear()
            self._handlers.clear()
            self.listener = None

    def open(self) -> None:
        """More outputs are to come: it is worth waiting for them."""
        with self._changed:
            self._is_open = True

    def close(self) -> None:
        """No more outputs are to come."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def get(self, request_id: str | None, timeout: float | None) -> Output | None:
        """
        The next output, of one request if it is named; None after `timeout` seconds, or if there will be none.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                for output in self._outputs:
                    if request_id is None or output.request_id == request_id:
                        self._outputs.remove(output)
                        return output
                left = None if until is None else until - time.monotonic()
                if not self._is_open or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)


def _call_soon(loop: asyncio.AbstractEventLoop, calls: list[tuple[Callable[[Output], None], Output]]) -> None:
    """Each on its own: one that fails is no affair of the others."""
    for callback, output in calls:
        loop.call_soon(callback, output)
