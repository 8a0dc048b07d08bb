"""Results of requests, delivered to other threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from ..engine.request import SpeculativeGenerationOutput as Output


class Results:
    """A queue of outputs in order. Outputs with a handler, or all outputs if there is a listener, go there instead."""

    def __init__(self) -> None:
        self.listener: Callable[[list[Output]], None] | None = None
        self._outputs: OrderedDict[int, Output] = OrderedDict()
        self._numbers: dict[str, deque[int]] = {}  # those of a request's outputs, so that `get` searches for none
        self._num_queued = 0
        self._handlers: dict[str, tuple[Callable[[Output], None], asyncio.AbstractEventLoop]] = {}
        self._changed = threading.Condition()
        self._is_open = True

    def register(self, request_id: str, callback: Callable[[Output], None], loop: asyncio.AbstractEventLoop) -> None:
        """Registers a callback for a request's outputs, called in `loop`. Queued outputs are delivered to it first."""
        with self._changed:
            self._handlers[request_id] = callback, loop
            mine = [self._take(request_id) for _ in range(len(self._numbers.get(request_id, ())))]
            self._call_handlers(mine)

    def unregister(self, request_id: str) -> None:
        """Removes a request's handler, if there is one."""
        with self._changed:
            self._handlers.pop(request_id, None)

    def deliver(self, outputs: Iterable[Output]) -> None:
        """
        Hands outputs to the listener or to their handlers, or queues them. All outputs of a step come in one call, so
        that a waiting thread is woken once and does not compete with the next step for every output.
        """
        with self._changed:  # held to the end, so that outputs stay in order
            if self.listener is not None:
                try:
                    self.listener(list(outputs))
                except BaseException:
                    self.listener = None  # not called again
                    raise
                return
            for output in self._call_handlers(outputs):
                self._outputs[self._num_queued] = output
                self._numbers.setdefault(output.request_id, deque()).append(self._num_queued)
                self._num_queued += 1
            self._changed.notify_all()

    def _call_handlers(self, outputs: Iterable[Output]) -> list[Output]:
        """Schedules the outputs' handlers, waking each event loop once. Returns the outputs without a handler."""
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
                pass  # the loop is closed, and its handlers with it
        return left

    def clear(self) -> None:
        """Drops queued outputs, handlers and the listener."""
        with self._changed:
            self._outputs.clear()
            self._numbers.clear()
            self._handlers.clear()
            self.listener = None

    def open(self) -> None:
        """Lets `get` wait for further outputs."""
        self._is_open = True  # without `_changed`, which a listener may hold that waits for the caller's locks

    def close(self) -> None:
        """Ends waiting in `get`, because no more outputs will come."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def get(self, request_id: str | None, timeout: float | None) -> Output | None:
        """
        Waits for the next output, of one request if `request_id` is given. Returns None after `timeout` seconds, or if
        the queue is closed and has none.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._outputs if request_id is None else request_id in self._numbers:
                    return self._take(request_id)
                left = None if until is None else until - time.monotonic()
                if not self._is_open or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)

    def _take(self, request_id: str | None) -> Output:
        """Removes and returns the oldest output, of one request if `request_id` is given."""
        number = next(iter(self._outputs)) if request_id is None else self._numbers[request_id][0]
        output = self._outputs.pop(number)
        numbers = self._numbers[output.request_id]
        numbers.popleft()  # it is this request's oldest, too
        if not numbers:
            del self._numbers[output.request_id]
        return output


def _call_soon(loop: asyncio.AbstractEventLoop, calls: list[tuple[Callable[[Output], None], Output]]) -> None:
    """Schedules each callback on its own, so that an exception in one does not keep the others from running."""
    for callback, output in calls:
        loop.call_soon(callback, output)
