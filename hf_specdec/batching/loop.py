"""The thread that runs requests: how it starts, rests, goes on and ends."""

from __future__ import annotations

import atexit
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
from transformers.utils import logging

from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.request import SpeculativeGenerationOutput as Output
from .open_requests import OpenRequests
from .pauses import Pauses


logger = logging.get_logger(__name__)

STOPPED = "The manager was stopped before the request was done."
"""Error of requests that a stop at once has ended."""


_started: weakref.WeakSet[RequestLoop] = weakref.WeakSet()
SECONDS_OF_REST = 0.05
"""Seconds without requests after which there is spare time."""
SECONDS_AT_EXIT = 10.0
"""Seconds that each thread has to end when the program does."""


@atexit.register
def _end_threads() -> None:
    """Ends the threads that still run when the program ends: in the midst of a step they would abort it."""
    running = [loop for loop in list(_started) if loop.is_running]
    for loop in running:
        loop.stop(at_once=True)
    for loop in running:
        if not loop.pauses.are_wanted:  # a thread that rests aborts nothing, and would not end
            loop.join(SECONDS_AT_EXIT)


class RequestLoop:
    """
    The thread that owns the engine. Other threads submit requests and cancellations to it and read its results.

    Args:
        engine (`Engine`): runs the requests.
    """

    def __init__(self, engine: Engine):
        self.engine, self._requests = engine, OpenRequests(engine)
        self.results = self._requests.results
        self.inbox = self._requests.inbox
        """Open requests, and cancellations of them."""
        self.fatal_error: BaseException | None = None
        """The exception that ended the thread; None if there was none."""
        self.prepare: Callable[[], None] | None = None
        """Called once when the thread starts, before it takes requests, such as a warm-up."""
        self.is_preparing = False
        """Whether `prepare` runs at present."""
        self.use_spare_time: Callable[[float], bool] = lambda seconds: False
        self._seconds = 0.0
        """Seconds of steps since it was called last."""
        """Called between steps, and while there are no requests as long as it returns True: that it did something."""
        self.pauses = Pauses()
        """Pauses, during which the thread leaves the models to other threads."""
        self._thread: threading.Thread | None = None
        self._ends_here: threading.Event | None = None
        """Set at the end of `run_here`, whose thread goes on; None in a thread of the loop's own."""
        self._stops: str | None = None

    # ------------------------------------------------------------------------------------------------- start and stop

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started and is alive."""
        thread = self._thread  # another thread may set it to None
        return thread is not None and thread.is_alive()

    @property
    def may_go_on(self) -> bool:
        """Whether the thread has been asked neither to end nor to pause."""
        return self._stops is None and not self.pauses.are_wanted

    @property
    def is_stopping(self) -> bool:
        """Whether the thread runs and has been asked to end."""
        return self._stops is not None and self.is_running

    def start(self) -> bool:
        """Starts the thread. Returns False if it runs already."""
        thread = threading.Thread(target=self._run, name="hf-specdec-manager", daemon=True)
        with self.inbox.lock:  # of several threads that start it, one does
            if self.is_running:
                return False
            self._open(thread)
            thread.start()
        return True

    def run_here(self, listener: Callable[[list[Output]], None]) -> None:
        """
        Runs the submitted requests to their end in the calling thread, with their results sent to `listener`. (On a
        CPU every computing thread has worker threads of its own. When there are more workers than cores, GNU OpenMP
        makes them sleep while they wait: on two cores, steps of SmolLM2-135M in a second thread took a fifth longer
        after the first had computed.)

        Raises:
            RuntimeError: if the loop is running already.
        """
        with self.inbox.lock:
            if self.is_running:
                raise RuntimeError("The manager is running already.")
            self._open(threading.current_thread(), "when done")
            ends_here = self._ends_here = threading.Event()
        self.results.listener = listener
        device = self.engine.target.device.type
        try:
            with ExitStack() as stack:  # the defaults of a new thread
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.autocast(device, enabled=False))
                if torch.get_default_device().type != "cpu":
                    stack.enter_context(torch.device("cpu"))
                self._run()
        finally:
            self.results.clear()
            self._thread = None
            ends_here.set()
        if self.fatal_error is not None and not isinstance(self.fatal_error, Exception):
            raise self.fatal_error

    def _open(self, thread: threading.Thread, stops: str | None = None) -> None:
        """Makes the loop ready to run in a thread, with `stops` as if `stop` had been called before."""
        self.fatal_error = self._ends_here = None
        self._thread, self._stops = thread, stops
        self.results.open()
        _started.add(self)

    def stop(self, at_once: bool) -> None:
        """Asks the thread to end, at once or when all requests are done. Does not wait for it."""
        self._stops = "at once" if at_once else self._stops or "when done"
        self.inbox.news.set()

    def pause(self) -> threading.Thread:
        """
        Pauses the thread until `pauses.end` is called with the returned holder, and waits until it has paused.

        Raises:
            RuntimeError: if the thread does not run, ends first, or is the calling thread.
        """
        if not self.is_running:
            raise RuntimeError("`pause`: the manager is not running. Without a thread there is nothing to pause.")
        if threading.current_thread() is self._thread:
            raise RuntimeError("`pause`: called by the manager's own thread, which would wait for itself.")
        return self.pauses.begin(self.inbox.news.set, lambda: self.is_running)

    def join(self, timeout: float | None) -> None:
        """Waits at most `timeout` seconds (None: for ever) for the thread to end."""
        with self.inbox.lock:
            thread, ends_here = self._thread, self._ends_here
        if thread is None:
            return
        if ends_here is None or thread is threading.current_thread():
            thread.join(timeout)  # an error in the thread itself
            has_ended = not thread.is_alive()
        else:
            has_ended = ends_here.wait(timeout)
        if not has_ended:
            logger.warning(f"The manager's thread did not end within {timeout} seconds.")
        elif self._thread is thread:  # else it was started anew meanwhile
            self._thread = None

    # -------------------------------------------------------------------------------------------- from other threads

    def check_open(self) -> None:
        """
        Checks that requests may be submitted.

        Raises:
            RuntimeError: if the thread has ended with an error, or has been asked to end.
        """
        if self.fatal_error is not None:
            raise RuntimeError("The manager has ended with an error.") from self.fatal_error
        if self.is_stopping:
            raise RuntimeError("The manager is stopping and takes no more requests.")

    def submit(self, requests: list[Request], check: Callable[[], None] = lambda: None) -> None:
        """
        Puts requests into the inbox; all of them or, on an error, none. Until they are in it, nothing is submitted
        after `check`, which may raise.

        Raises:
            ValueError: if a `request_id` is that of another request that is not over.
            RuntimeError: if the thread takes no more requests; see `check_open`.
        """
        with self.inbox.lock:  # a request is either ended by `OpenRequests.end_all` or refused here
            self.check_open()
            check()
            self.inbox.add(requests)

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        device = self.engine.target.device
        is_numbered = device.type == "cuda" and device.index is not None
        self.engine.device_steps.deliver_results, self.engine.has_news = self._requests.deliver, self.inbox.news.is_set
        try:
            while True:
                with torch.cuda.device(device) if is_numbered else nullcontext(), self.engine.running():
                    self.is_preparing = self.prepare is not None and self._stops != "at once"
                    prepare, self.prepare = self.prepare, None
                    if prepare is not None and self.is_preparing:
                        self._prepare(prepare)
                    while self._go_on():
                        pass
                if self._is_to_end and not self.pauses.are_wanted:
                    break
                self._rest()
            self.fail_all(STOPPED)
        except BaseException as error:
            if isinstance(error, Exception):
                logger.error("The manager has ended with an error.", exc_info=True)
            self.fatal_error = error
            self.fail_all(f"The manager has ended with an error: {type(error).__name__}: {error}")
        finally:
            # No reference cycle: K/V must be freed with the manager.
            self.engine.device_steps.deliver_results, self.engine.has_news = lambda: None, lambda: False
            self.results.close()

    def _prepare(self, prepare: Callable[[], None]) -> None:
        """
        Runs `prepare`, which ends early for a pause and is run again after it. If it fails, a warning is given and
        requests are served without it.
        """
        self.is_preparing = True
        try:
            prepare()
            if self.pauses.are_wanted and self._stops is None:
                self.prepare = prepare
        except Exception as error:  # any error: requests are served without it
            for request in [*self.engine.scheduler.active, *self.engine.scheduler.waiting]:  # dummies alone
                self.engine.bookkeeping.mark_nan([request])
                self.engine.end(request)
            warnings.warn(
                f"The manager could not warm up, and starts cold: {type(error).__name__}: {error}", stacklevel=2
            )
        finally:
            self.is_preparing = False

    @property
    def _is_to_end(self) -> bool:
        """Whether the thread has been asked to end and has nothing left to do first."""
        if self._stops == "when done":
            return not self.engine.scheduler.has_work and not self.inbox.has_new
        return self._stops is not None

    def _rest(self) -> None:
        """Delivers pending results and waits until all pauses have ended."""
        self._requests.deliver()
        if self.engine.target.device.type == "cuda":
            torch.cuda.synchronize(self.engine.target.device)
        self.pauses.rest()

    def _go_on(self) -> bool:
        """Runs a step or several, or waits for requests. Returns False if the thread is to pause or to end."""
        self.inbox.news.clear()
        if self.pauses.are_wanted or self.prepare is not None:  # nothing is taken in before a warm-up
            return False
        self._requests.take_in()
        if self._is_to_end or self.engine.target.adapters.is_stale:
            return False
        if self.engine.scheduler.has_work:
            began = time.perf_counter()
            self._requests.step()
            self._seconds += time.perf_counter() - began
            if not self.engine.scheduler.has_work:
                self._requests.deliver()
            elif not self.inbox.news.is_set():
                self._use_spare_time()
        elif self._stops is None and not self.inbox.news.wait(SECONDS_OF_REST) and not self._use_spare_time():
            self.inbox.news.wait()
        return True

    def _use_spare_time(self) -> bool:
        seconds, self._seconds = self._seconds, 0.0
        return self.use_spare_time(seconds)

    def fail_all(self, error: str) -> None:
        """Ends all open requests with an error; to be called by the loop's thread."""
        self._requests.deliver_last(self._requests.end_all(error))

    def fail_idle(self, error: str) -> bool:
        """Ends all open requests with an error if the loop does not run, which is returned."""
        with self.inbox.lock:
            if self.is_running:
                return False
            outputs = self._requests.end_all(error)
        self._requests.deliver_last(outputs)
        return True
