"""What other threads ask of the thread that runs requests: new requests, and cancellations."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress

from ..engine.request import Request, RequestStatus


class Inbox:
    """The requests that are not over, by name: those that are running, and those that have yet to be taken out."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while requests come or go, and by those for whom none may meanwhile."""
        self.news = threading.Event()
        """Set when there is something to take out, or something else for the thread to look at."""
        self._new: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._cancelled: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def pending(self) -> list[Request]:
        """Requests without a place, the oldest first."""
        with self.lock:
            return [request for request in self._requests.values() if request.status == RequestStatus.PENDING]

    @property
    def has_new(self) -> bool:
        """Whether there are requests to take out."""
        return not self._new.empty()

    def add(self, requests: list[Request]) -> None:
        """
        Adds requests; all of them or, on an error, none.

        Raises:
            ValueError: if a `request_id` is that of another request that is not over.
        """
        with self.lock:
            for request in requests:
                if request.request_id in self:
                    raise ValueError(f"`request_id={request.request_id!r}` is running already. Give another.")
            for request in requests:
                self._requests[request.request_id] = request
                self._new.put(request)
        self.news.set()

    def cancel(self, request_id: str) -> None:
        """Asks for a request to be cancelled; does nothing if none of this name is open."""
        with self.lock:
            request = self._requests.get(request_id)
        if request is not None:
            self._cancelled.put(request)
            self.news.set()

    def new(self) -> Iterator[Request]:
        """Takes out new requests, but for those that were cancelled before."""
        return _left_in(self._new)

    def cancelled(self) -> Iterator[Request]:
        """Takes out the requests that are to be cancelled."""
        return _left_in(self._cancelled)

    def forget(self, request: Request) -> None:
        """Forgets a request that is over."""
        with self.lock:
            self._requests.pop(request.request_id, None)

    def clear(self) -> list[Request]:
        """Takes out everything, and returns the requests that were not over; to be called under `lock`."""
        left = list(self._requests.values())
        self._requests.clear()
        for box in (self._new, self._cancelled):
            with suppress(queue.Empty):
                while True:
                    box.get_nowait()
        return left


def _left_in(box: queue.SimpleQueue[Request]) -> Iterator[Request]:
    while not box.empty():
        request = box.get()
        if not request.is_over:
            yield request
