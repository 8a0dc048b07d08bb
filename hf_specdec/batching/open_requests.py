"""Requests that are not over: from the inbox through the engine's steps to their results."""

from __future__ import annotations

from contextlib import suppress

from ..engine.engine import Engine
from ..engine.request import Request, RequestStatus
from ..engine.request import SpeculativeGenerationOutput as Output
from .inbox import Inbox
from .results import Results


class OpenRequests:
    """
    The requests that an engine runs. Other threads put them, and cancellations, into the inbox, and read the results;
    everything else here is called by the thread that owns the engine.

    Args:
        engine (`Engine`): runs the requests.
    """

    def __init__(self, engine: Engine):
        self.engine, self.inbox, self.results = engine, Inbox(), Results()
        self._undelivered: list[tuple[Request, RequestStatus]] = []
        """
        Requests whose latest results are not yet delivered, with their status then. Results are built and delivered
        while the device runs the next step: until then a request may lose its blocks, but gets no tokens and does not
        fail.
        """

    def take_in(self) -> None:
        """Hands new requests to the engine, and ends those that were cancelled."""
        for request in self.inbox.new():
            self.engine.scheduler.add(request)
        for request in self.inbox.cancelled():
            self.deliver()
            request.fail("cancelled")
            self._forget(request)
            self.results.deliver([request.to_generation_output()])

    def step(self) -> None:
        """Runs a step of the engine, or several."""
        for requests in self.engine.step():
            for request in requests:
                if request.is_over:
                    self._forget(request)
            shown = (request for request in requests if request.is_over or request.streaming)
            self._undelivered += [(request, request.status) for request in shown]

    def deliver(self) -> None:
        """Delivers the results that are not yet delivered."""
        outputs = self._take_undelivered()
        if outputs:
            self.results.deliver(outputs)

    def end_all(self, error: str) -> list[Output]:
        """Ends all open requests with an error, and returns all results that are not yet delivered."""
        outputs = self._take_undelivered()
        with self.inbox.lock:
            left = self.inbox.clear()
            for request in left:
                request.fail(error)
                with suppress(Exception):  # an error of the device lasts, and must not keep results back
                    self.engine.bookkeeping.mark_nan([request])
                    self.engine.end(request)
        return outputs + [request.to_generation_output() for request in left]

    def deliver_last(self, outputs: list[Output]) -> None:
        """Delivers outputs, and queues them if the listener raises: it is not called again."""
        if outputs:
            try:
                self.results.deliver(outputs)
            except BaseException:
                self.results.deliver(outputs)
                raise

    def _take_undelivered(self) -> list[Output]:
        results, self._undelivered = self._undelivered, []
        return [request.to_generation_output(status) for request, status in results]

    def _forget(self, request: Request) -> None:
        self.engine.end(request)
        self.inbox.forget(request)
