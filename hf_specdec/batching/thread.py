"""`HasThread`: how a manager's thread starts, pauses and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from transformers import PreTrainedModel
from transformers.utils import logging

from ..engine.request import SpeculativeGenerationOutput as Output
from .keeping import keep
from .loop import STOPPED, RequestLoop


logger = logging.get_logger(__name__)


class HasThread:
    """The part of a manager that has to do with its thread."""

    model: PreTrainedModel
    _loop: RequestLoop

    def is_running(self) -> bool:
        """Whether the thread has been started and is alive."""
        return self._loop.is_running

    @property
    def background_thread_status(self) -> RequestLoop:
        """The manager's loop, whose `fatal_error` is the error that ended its thread, or None."""
        return self._loop

    def start(self) -> None:
        """Starts the thread."""
        if not self._loop.start():
            logger.warning("The manager is already running.")

    def run_here(self, take: Callable[[list[Output]], None]) -> None:
        """
        Runs all added requests to their end in the calling thread, and passes the results of each step to `take`.

        Raises:
            RuntimeError: if the manager is running.
        """
        self._loop.run_here(take)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """
        Stops the thread when all requests are done, or with `hard_stop` at once, which fails the remaining requests.

        Args:
            block (`bool`): whether to wait until the thread has ended.
            timeout (`float`, *optional*): most seconds to wait; by default any time.
            keep_for_next_session (`bool`): whether the model keeps the manager, with its K/V memory and CUDA graphs,
                for the next call with the same draft and configuration
                (`model.destroy_cached_continuous_batching_manager()` frees it).
            hard_stop (`bool`): whether to stop at once.

        Raises:
            RuntimeError: if the calling thread is inside `pause`, where the manager's thread cannot end.
        """
        if self._loop.pauses.are_held_here:
            raise RuntimeError("`stop`: inside a `pause` the manager's thread cannot end. Leave that first.")
        if not (hard_stop and self._loop.fail_idle(STOPPED)) and self.is_running():
            stopped_at = time.perf_counter()
            self._loop.stop(at_once=hard_stop)
            if block:
                self.join(stopped_at, timeout)
        if keep_for_next_session and self._loop.fatal_error is None:
            keep(self)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """
        Waits for the thread to end.

        Args:
            stop_trigger_time (`float`, *optional*): when it was told to (`time.perf_counter()`): the log tells how
                long ago that was, as in transformers.
            timeout (`float`, *optional*): most seconds to wait; by default any time.

        Raises:
            RuntimeError: without a `timeout`, if the calling thread is inside `pause`, where the thread cannot end.
        """
        if timeout is None and self._loop.pauses.are_held_here:
            raise RuntimeError("`join`: inside a `pause` the manager's thread cannot end. Leave that first.")
        self._loop.join(timeout)
        if stop_trigger_time is not None and not self.is_running():
            seconds = time.perf_counter() - stop_trigger_time
            logger.info(f"The manager's thread has ended {seconds:.2f} s after it was told to.")

    def destroy(self) -> None:
        """Stops the thread at once and fails all open requests."""
        self.stop(hard_stop=True)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """
        A context in which the manager's thread pauses, so that the caller may use and change the models, as to update
        weights or to switch adapters. Running requests continue afterwards with the K/V that they have; requests added
        meanwhile wait. Several threads may hold a pause at a time; it is held by the thread that entered it, whichever
        leaves it.

        Raises:
            RuntimeError: if the manager is not running, ends before it pauses, or is paused from its own thread.
        """
        holder = self._loop.pause()
        try:
            yield
        finally:
            self._loop.pauses.end(holder)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.stop(hard_stop=kind is not None)
