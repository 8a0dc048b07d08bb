"""The requests to the engine that are not over, and what comes back for them, in their event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus

from ...batching import SpeculativeGenerationOutput
from .messages import AddReply, Progress


Handler = Callable[[SpeculativeGenerationOutput], None]


@dataclass(eq=False)
class _OpenRequest:
    """
    A request to the engine that is not over.

    Args:
        loop (`AbstractEventLoop`): the event loop that made the request, in which its handlers are called.
        admission (`asyncio.Future`): done when the engine has admitted the request.
        tokens (`list[int]`), logprobs (`list[float]`), top_logprobs (`list[list]`): tokens received so far, and their
            log-probabilities.
    """

    loop: asyncio.AbstractEventLoop
    admission: asyncio.Future[None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    def output(self, part: Progress) -> SpeculativeGenerationOutput:
        """Adds new tokens, and returns all so far with the request's present status."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.top_logprobs += part.top_logprobs
        return SpeculativeGenerationOutput(
            part.request_id,
            generated_tokens=self.tokens,
            logprobs=self.logprobs,
            error=part.error,
            status=part.status,
            finish_reason=part.finish_reason,
            fails_by_its_options=part.fails_by_its_options,
            top_logprobs=self.top_logprobs,
            num_cached_tokens=part.num_cached_tokens,
        )


class OpenRequests:
    """Knows each open request by its name. Requests and handlers are added in event loops; others may tell of them."""

    def __init__(self) -> None:
        self._requests: dict[str, _OpenRequest] = {}
        self._handlers: dict[str, Handler] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, name: str) -> asyncio.Future[None]:
        """Adds a request of the running event loop, and returns what is done when the engine has admitted it."""
        loop = asyncio.get_running_loop()
        request = self._requests[name] = _OpenRequest(loop, loop.create_future())
        return request.admission

    def add_handler(self, name: str, handler: Handler) -> None:
        """Lets `handler` be called with every result of a request, in its event loop."""
        self._handlers[name] = handler

    def remove_handler(self, name: str) -> None:
        """Removes a request's handler, if there is one."""
        self._handlers.pop(name, None)

    def note_reply(self, reply: AddReply) -> None:
        """Lets a request be admitted or refused; called in any thread."""
        self._in_their_loops(self._admit, [reply])

    def note_progress(self, parts: Iterable[Progress]) -> None:
        """Lets handlers know new tokens; called in any thread."""
        self._in_their_loops(self._hand_on, parts)

    def fail(self, reason: str) -> None:
        """Fails all requests; called in any thread."""
        self.note_progress([Progress(name, [], RequestStatus.FAILED, reason) for name in list(self._requests)])

    def _in_their_loops(self, take: Callable[[list[Any]], None], parts: Iterable[AddReply | Progress]) -> None:
        """Calls `take` with the parts of each event loop's requests in that loop, waking each loop once."""
        of_loops: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        for part in parts:
            request = self._requests.get(part.request_id)
            if request is not None:
                of_loops.setdefault(request.loop, []).append(part)
        for loop, own in of_loops.items():
            try:
                loop.call_soon_threadsafe(take, own)
            except RuntimeError:
                pass  # the loop is closed, and its handlers with it

    def _admit(self, replies: list[AddReply]) -> None:
        for reply in replies:
            request, error = self._requests.get(reply.request_id), reply.error
            if request is None:
                continue
            admission = request.admission  # already done if its waiter was cancelled
            if error is None and not admission.done():
                admission.set_result(None)
            if error is not None:
                if not admission.done():
                    admission.set_exception(error)
                    admission.exception()  # so that asyncio does not log an exception that was never retrieved
                self._hand_on([Progress(reply.request_id, [], RequestStatus.FAILED, str(error))])

    def _hand_on(self, parts: list[Progress]) -> None:
        for part in parts:
            request = self._requests.get(part.request_id)
            if request is None:
                continue
            output, handler = request.output(part), self._handlers.get(part.request_id)
            if part.status >= RequestStatus.FINISHED:
                del self._requests[part.request_id]
                self.remove_handler(part.request_id)
                if not request.admission.done():
                    # Its result came before the reply to its addition, or the engine has ended.
                    request.admission.set_result(None)
            if handler is not None:
                # Scheduled separately, so that a failing handler does not keep the others from running.
                request.loop.call_soon(handler, output)
