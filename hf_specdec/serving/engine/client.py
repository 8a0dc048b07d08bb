"""The manager, as the server sees it: in another process."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ...batching import ManagerState
from .messages import AddRequest, Admission, AskState, CancelRequest, Ended, Progress, Served, State


SECONDS_FOR_STATE = 30.0
Handler = Callable[[GenerationOutput], None]


@dataclass(eq=False)
class _OpenRequest:
    """
    Args:
        loop (`AbstractEventLoop`): where it was asked for. All that comes of it happens there.
        admission (`asyncio.Future`): done when the engine has taken it.
        tokens (`list[int]`): those that have come.
    """

    loop: asyncio.AbstractEventLoop
    admission: asyncio.Future[None]
    tokens: list[int] = field(default_factory=list)


class EngineClient:
    """
    Asks an `EngineServer` for texts, from event loops. What transformers' server asks of a manager of its own is
    there; nothing waits for the engine but `state`.

    Args:
        connection (`Connection`): one end of a pipe; the engine has the other, and has said that it is there.
        served (`Served`): how.
    """

    def __init__(self, connection: Connection, served: Served):
        self.model = served
        """The model, as far as the server needs it: its config and generation config."""
        self.fatal_error: Exception | None = None
        """Why the engine takes no more requests."""
        self._is_gone = False
        self._connection = connection
        self._open: dict[str, _OpenRequest] = {}
        self._handlers: dict[str, Handler] = {}
        self._states: dict[int, Future[ManagerState]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    @property
    def background_thread_status(self) -> EngineClient:
        """What tells by its `fatal_error` whether the engine has ended."""
        return self

    @property
    def state(self) -> ManagerState:
        """
        What the manager is doing now. Waits for it, so not to be asked in an event loop.

        Raises:
            RuntimeError: if the engine's process has ended.
            TimeoutError: if it does not answer.
        """
        number, answer = next(self._numbers), Future[ManagerState]()
        with self._lock:  # so that all that is open is told of an end, or sees it
            if self._is_gone:
                self._check_alive()
            self._states[number] = answer
        self._outbox.put(AskState(number))
        try:
            return answer.result(SECONDS_FOR_STATE)
        finally:
            self._states.pop(number, None)

    def close(self) -> None:
        """Takes leave of the engine, which cancels what is open and closes its end."""
        self._outbox.put(None)

    # ------------------------------------------------------------------------------------------- from an event loop

    def add_request(
        self,
        input_ids: list[int],
        request_id: str,
        *,
        generation_config: GenerationConfig,
        streaming: bool = False,
        seed: int | None = None,
    ) -> asyncio.Future[None]:
        """
        Asks for a text; see `SpeculativeBatchingManager.add_request`.

        Returns:
            `asyncio.Future`: done when the engine has taken the request. It raises the `ValueError`, `TypeError` or
            `queue.Full` with which that refuses it; the handler is told as well.

        Raises:
            RuntimeError: if the engine has ended.
        """
        loop = asyncio.get_running_loop()
        request = _OpenRequest(loop, loop.create_future())
        with self._lock:
            self._check_alive()
            self._open[request_id] = request
        self._outbox.put(AddRequest(request_id, list(input_ids), generation_config, seed, streaming))
        return request.admission

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        """
        Lets `callback` be called with every result of a request. It may be there before the request, and is to be
        before the event loop goes on.
        """
        self._handlers[request_id] = callback

    def unregister_result_handler(self, request_id: str) -> None:
        """Forgets a request's handler, if there is one. (With its last result it is forgotten by itself.)"""
        self._handlers.pop(request_id, None)

    def cancel_request(self, request_id: str) -> None:
        """Ends a request; nothing happens if it is over."""
        self._outbox.put(CancelRequest(request_id))

    def _check_alive(self) -> None:
        if self.fatal_error is not None:
            raise RuntimeError(f"The engine has ended. {self.fatal_error}") from self.fatal_error

    # ------------------------------------------------------------------------------------- what comes from the engine

    def _write(self) -> None:
        """A thread: an event loop does not wait for a full pipe."""
        message: Any = ...
        try:
            while message is not None:
                message = self._outbox.get()
                self._send(message)
        except OSError:
            pass  # the engine has ended: the other thread sees to it

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise
        except Exception as error:  # an option that cannot be pickled is its request's own affair
            if isinstance(message, AddRequest):
                self._handle(Admission.refused(message.request_id, error))

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._end("Its process is no more.")
            self._connection.close()

    def _handle(self, message: Any) -> None:
        if isinstance(message, list):
            self._in_their_loops(self._progress, ((part.request_id, part) for part in message))
        elif isinstance(message, Admission):
            self._in_their_loops(self._admission, [(message.request_id, message)])
        elif isinstance(message, State):
            answer = self._states.get(message.number)
            if answer is not None:
                answer.set_result(message.state)
        elif isinstance(message, Ended):
            self.fatal_error = RuntimeError(message.error)

    def _end(self, reason: str) -> None:
        with self._lock:
            self._is_gone, self.fatal_error = True, self.fatal_error or RuntimeError(reason)
            left, states = list(self._open), list(self._states.values())
        failed = (Progress(name, [], RequestStatus.FAILED, f"The engine has ended. {reason}") for name in left)
        self._in_their_loops(self._progress, ((part.request_id, part) for part in failed))
        for state in states:
            if not state.done():
                state.set_exception(RuntimeError(f"The engine has ended. {reason}"))

    def _in_their_loops(self, take: Callable[[list[Any]], None], parts: Iterable[tuple[str, Any]]) -> None:
        """Wakes each event loop once."""
        of_loops: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        for name, part in parts:
            request = self._open.get(name)
            if request is not None:
                of_loops.setdefault(request.loop, []).append(part)
        for loop, own in of_loops.items():
            try:
                loop.call_soon_threadsafe(take, own)
            except RuntimeError:
                pass  # the loop is closed: nobody is left to be told

    # ----------------------------------------------------------------------------------------------- in an event loop

    def _admission(self, admissions: list[Admission]) -> None:
        for one in admissions:
            request, error = self._open.get(one.request_id), one.error
            if request is None:
                continue
            admission = request.admission  # done already if nobody waits for it any more
            if error is None and not admission.done():
                admission.set_result(None)
            if error is not None:
                if not admission.done():
                    admission.set_exception(error)
                    admission.exception()  # so that nobody has to ask
                self._progress([Progress(one.request_id, [], RequestStatus.FAILED, str(error))])

    def _progress(self, parts: list[Progress]) -> None:
        for part in parts:
            request = self._open.get(part.request_id)
            if request is None:
                continue
            request.tokens += part.tokens
            handler = self._handlers.get(part.request_id)
            if part.status >= RequestStatus.FINISHED:
                del self._open[part.request_id]
                self._handlers.pop(part.request_id, None)
                if not request.admission.done():
                    request.admission.set_result(None)  # the engine has ended, which the handler is told
            if handler is not None:
                # Each on its own: one that fails is no affair of the others.
                request.loop.call_soon(handler, _output_of(part, request.tokens))


def _output_of(part: Progress, tokens: list[int]) -> GenerationOutput:
    return GenerationOutput(part.request_id, generated_tokens=tokens, error=part.error, status=part.status)
