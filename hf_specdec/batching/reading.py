"""`ReadsResults`: how the results of a manager's requests are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from ..engine.request import SpeculativeGenerationOutput as Output
from .loop import RequestLoop


class ReadsResults:
    """The part of a manager that has to do with results."""

    _loop: RequestLoop

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Output | None:
        """
        Waits for the next result, of one request if `request_id` is given. Returns None after `timeout` seconds, or if
        the manager has ended and no result is left.

        Raises:
            RuntimeError: without a `timeout`, if the calling thread is inside `pause`, where no result comes, and none
                is there yet.
        """
        if timeout is None and self._loop.pauses.are_held_here:
            result = self._loop.results.get(request_id, 0)
            if result is None:
                raise RuntimeError("`get_result`: inside a `pause` no result comes. Leave that first.")
            return result
        return self._loop.results.get(request_id, timeout if self._loop.is_running else 0)

    def __iter__(self) -> Iterator[Output]:
        """Yields results as they come, while the manager runs, and those that are left when it has ended."""
        return self._results_of(None)

    def request_id_iter(self, request_id: str) -> Iterator[Output]:
        """Yields results of one request as they come, up to its last."""
        for result in self._results_of(request_id):
            yield result
            if result.is_finished():
                return

    def _results_of(self, request_id: str | None) -> Iterator[Output]:
        is_running = True
        while (result := self.get_result(request_id, timeout=0.1)) is not None or is_running:
            is_running = self._loop.is_running  # if it has ended since, one more look tells what is left
            if result is not None:
                yield result

    def register_result_handler(self, request_id: str, callback: Callable[[Output], None]) -> None:
        """
        Registers a callback that gets every result of a request, called in the running event loop.

        Raises:
            RuntimeError: if no event loop runs in the calling thread.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise RuntimeError(
                "`register_result_handler` is for coroutines: it calls the callback in the running event loop, and "
                "there is none. Elsewhere use `get_result`, or iterate over the manager."
            ) from error
        self._loop.results.register(request_id, callback, loop)

    def unregister_result_handler(self, request_id: str) -> None:
        """Removes a request's result handler, if there is one. (The request's last result removes it as well.)"""
        self._loop.results.unregister(request_id)

    def listen(self, callback: Callable[[list[Output]], None]) -> None:
        """
        Sends all further results to `callback`, with the results of a step in one list, and nowhere else. The
        manager's thread calls it while the device runs the next step, so a short callback costs no time. An exception
        in the callback ends the manager.
        """
        self._loop.results.listener = callback
