"""Work on large requests, in threads beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar


Result = TypeVar("Result")

MOST_THREADS = 2
"""Threads that work on large requests. Others wait for their turn."""
SMALL = 8 * 2**10
"""Most bytes of a body with which work is done at once, in the event loop: some milliseconds."""

body_size: ContextVar[int] = ContextVar("body_size", default=0)
"""Bytes of the body of the current request."""


class WorkPool:
    """
    Does the work on large requests in a few threads, so that the event loop, which serves all others, goes on. (To
    tokenise a megabyte takes seconds, in which the tokenizers leave Python's global interpreter lock to others.)
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="hf-specdec large requests")

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """
        Calls a function: in a thread if the current request is large. If the waiting task is cancelled, as when its
        client disconnects, a call that has not begun never does, and the result of one that has is dropped.

        Returns:
            what the function returns.
        """
        if body_size.get() <= SMALL:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
