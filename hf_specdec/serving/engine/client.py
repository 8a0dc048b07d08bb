"""The HTTP server's side of the pipe to the engine's process."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from transformers import GenerationConfig

from ...batching import ManagerState
from ...verification.log_probabilities import LogprobOptions
from .messages import (
    AddReply,
    AddRequest,
    AskState,
    CancelRequest,
    Ended,
    NotServed,
    Pulse,
    Served,
    Stage,
    State,
    Warm,
)
from .open_requests import Handler, OpenRequests
from .options import StartError
from .stalls import Stalls


SECONDS_FOR_STATE = 30.0
SECONDS_FOR_EXIT_CODE = 3.0
"""Seconds that a process that has closed its end of the pipe may take to end."""
WARMING_UP = "Warming up: requests are taken now, and served after it."


class EngineClient:
    """
    Sends requests to an `EngineServer`, from event loops, with the methods that transformers' server calls on its own
    manager. Only `state` waits for the engine.

    Args:
        connection (`Connection`): one end of a pipe, whose other end the engine has.
        tell (`Callable`): called with a line about each stage of the start.
        process (`BaseProcess`, *optional*): the engine's process, for its exit code.
    """

    model: Served
    """Config and generation config of the model, which are all that the HTTP server needs of it. Comes when loaded."""

    def __init__(
        self,
        connection: Connection,
        tell: Callable[[str], None] = lambda text: None,
        process: BaseProcess | None = None,
    ):
        self.fatal_error: Exception | None = None
        """The error because of which the engine takes no more requests; None while it runs."""
        self.is_warm = False
        """Whether the engine has warmed up. Once loaded, it takes requests before, and serves them after."""
        self.stage = "The engine's process starts."
        """What the engine does until it is warm."""
        self.is_gone = False
        """Whether the engine has ended, or no longer matters because the server ends."""
        self._connection, self._tell, self._process = connection, tell, process
        self._loaded: Future[None] = Future()
        self._is_settled = threading.Event()
        """Set when the engine is warm, or has ended."""
        self._open = OpenRequests()
        self._stalls = Stalls()
        self._states: dict[int, Future[ManagerState]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    def wait_until_loaded(self) -> None:
        """
        Waits until the engine takes requests.

        Raises:
            StartError: if it cannot start.
        """
        self._loaded.result()

    def wait_until_warm(self) -> None:
        """
        Waits until the engine serves requests.

        Raises:
            StartError: if it has ended.
        """
        self._is_settled.wait()
        if self.fatal_error is not None:
            raise StartError("serve", str(self.fatal_error))

    @property
    def background_thread_status(self) -> EngineClient:
        """The client itself, whose `fatal_error` is the error that ended the engine, or None."""
        return self

    @property
    def seconds_stalled(self) -> float:
        """
        Seconds for which no forward has ended although there are requests; 0 without requests, and while the engine
        warms up, compiles or captures. Does not wait for the engine, so that it is known of one that hangs.
        """
        return self._stalls.seconds if self._open else 0.0

    @property
    def state(self) -> ManagerState:
        """
        The manager's present load and counts. Waits for the engine, so not to be called in an event loop.

        Raises:
            RuntimeError: if the engine's process has ended.
            TimeoutError: if the engine does not answer within `SECONDS_FOR_STATE`.
        """
        number, answer = next(self._numbers), Future[ManagerState]()
        with self._lock:  # an end of the engine is seen here, or fails the answer (`_end`)
            if self.is_gone:
                self._check_alive()
            self._states[number] = answer
        self._outbox.put(AskState(number))
        try:
            return answer.result(SECONDS_FOR_STATE)
        finally:
            self._states.pop(number, None)

    def fail_open(self, reason: str = "The server is shutting down.") -> None:
        """Fails open requests, and refuses further ones, because the server ends."""
        self._end(reason)

    def close(self) -> None:
        """Asks the engine to end: it cancels open requests and closes its end of the pipe."""
        self._outbox.put(None)

    def stop(self, timeout: float) -> bool:
        """
        Asks the engine to end, and waits at most `timeout` seconds until it has.

        Returns:
            `bool`: whether it has closed its end of the pipe, after its last step. Before it is loaded, it does not.
        """
        if not self._loaded.done() or self._loaded.exception() is not None:
            return False
        self.close()
        return self._is_closed.wait(timeout)

    # ------------------------------------------------------------------------------------------- from an event loop

    def add_request(
        self,
        input_ids: list[int],
        request_id: str,
        *,
        generation_config: GenerationConfig,
        streaming: bool = False,
        seed: int | None = None,
        model_inputs: dict[str, Any] | None = None,
        logprobs: LogprobOptions | None = None,
        **further: Any,
    ) -> asyncio.Future[None]:
        """
        Sends a request to the engine; see `SpeculativeBatchingManager.add_request`. `further` are other fields of an
        `AddRequest`.

        Returns:
            `asyncio.Future`: done when the engine has admitted the request. If the engine refuses the request, the
            future raises its `ValueError`, `TypeError` or `queue.Full`, and the handler gets a failed result.

        Raises:
            RuntimeError: if the engine has ended.
        """
        with self._lock:
            self._check_alive()
            if not self._open:
                self._stalls.note_work()
            admission = self._open.add(request_id)
        about = generation_config, seed, streaming, model_inputs, logprobs
        message = AddRequest(request_id, list(input_ids), *about, **further)
        self._outbox.put(message)
        return admission

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        """
        Registers a callback for every result of a request. It may be registered before the request, and must be before
        the event loop continues.
        """
        self._open.add_handler(request_id, callback)

    def unregister_result_handler(self, request_id: str) -> None:
        """Removes a request's result handler, if there is one. (The request's last result removes it as well.)"""
        self._open.remove_handler(request_id)

    def cancel_request(self, request_id: str) -> None:
        """Asks the engine to cancel a request; does nothing if it is over."""
        self._outbox.put(CancelRequest(request_id))

    def _check_alive(self) -> None:
        if self.fatal_error is not None:
            raise RuntimeError(str(self.fatal_error)) from self.fatal_error

    # ------------------------------------------------------------------------------------- what comes from the engine

    def _write(self) -> None:
        """The thread that writes to the pipe, so that no event loop waits for a full pipe."""
        message: Any = ...
        try:
            while message is not None:
                message = self._outbox.get()
                self._send(message)
        except OSError:
            pass  # the engine has ended, which `_read` handles

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise
        except Exception as error:  # an option that cannot be pickled fails only its request
            if isinstance(message, AddRequest):
                self._handle(AddReply.refused(message.request_id, error))

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._end(f"The engine has ended. Its process is no more{self._exit_code()}.")
            self._is_closed.set()
            self._connection.close()

    def _exit_code(self) -> str:
        if self._process is None:
            return ""
        self._process.join(SECONDS_FOR_EXIT_CODE)
        code = self._process.exitcode
        return "" if code is None else f" (exit code {code})"

    def _handle(self, message: Any) -> None:
        if isinstance(message, list):
            self._stalls.note_forward()
            self._open.note_progress(message)
        elif isinstance(message, AddReply):
            self._open.note_reply(message)
        elif isinstance(message, State):
            answer = self._states.get(message.number)
            if answer is not None:
                answer.set_result(message.state)
        elif isinstance(message, Stage):
            self._note_stage(message.text)
        elif isinstance(message, Served):
            self.model = message
            if message.is_warm:
                self._note_warm()
            else:
                self._note_stage(WARMING_UP)
            with self._lock:
                if not self._loaded.done():  # the server may end already
                    self._loaded.set_result(None)
        elif isinstance(message, Warm):
            self._note_warm()
        elif isinstance(message, NotServed):
            self._end(message.reason, StartError(message.option, message.reason))
        elif isinstance(message, Pulse):
            self._stalls.note_pulse(message)
        elif isinstance(message, Ended):
            self.fatal_error = RuntimeError(f"The engine has ended. {message.error}")
            self._is_settled.set()

    def _note_stage(self, text: str) -> None:
        self.stage = text
        self._tell(text)

    def _note_warm(self) -> None:
        self.is_warm, self.stage = True, "Ready."
        self._is_settled.set()

    def _end(self, reason: str, start_error: StartError | None = None) -> None:
        """Fails open requests, and refuses further ones."""
        with self._lock:
            self.is_gone, self.fatal_error = True, self.fatal_error or RuntimeError(reason)
            states = list(self._states.values())
            if not self._loaded.done():
                self._loaded.set_exception(start_error or StartError("serve", str(self.fatal_error)))
        self._is_settled.set()
        self._open.fail(reason)
        for state in states:
            if not state.done():
                state.set_exception(RuntimeError(reason))
