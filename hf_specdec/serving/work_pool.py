"""Work on large requests, images and long answers, in threads beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar


Result = TypeVar("Result")

MOST_THREADS = 2
"""Threads that work on large requests, and threads that read images. Others wait for their turn."""
SMALL = 8 * 2**10
"""Most bytes of a body with which work is done at once, in the event loop: some milliseconds."""
FEW_TOKENS = 1024
"""Most tokens of a text, prompt and answer, with which work is done at once."""

body_size: ContextVar[int] = ContextVar("body_size", default=0)
"""Bytes of the body of the current request."""


class WorkPool:
    """
    Does the work on large requests and long answers in a few threads, so that the event loop, which serves all others,
    goes on. (To tokenise a megabyte takes seconds, in which the tokenizers leave Python's global interpreter lock to
    others.)
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="hf-specdec large requests")
        self._of_images = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="hf-specdec images")

    async def run(
        self, function: Callable[..., Result], *arguments: object, num_tokens: int = 0, reads_images: bool = False
    ) -> Result:
        """
        Calls a function: in a thread if the current request, or the text that the work is on, is large, or has images.
        If the waiting task is cancelled, as when its client disconnects, a call that has not begun never does, and the
        result of one that has is dropped.

        Args:
            function (`Callable`): is called.
            arguments: of the function.
            num_tokens (`int`, *optional*, defaults to 0): tokens of the text.
            reads_images (`bool`, *optional*, defaults to `False`): whether it reads images, for which hosts may let it
                wait: in threads of their own, so that no text waits with them.

        Returns:
            what the function returns.
        """
        loop = asyncio.get_running_loop()
        if reads_images:
            return await loop.run_in_executor(self._of_images, function, *arguments)
        if body_size.get() <= SMALL and num_tokens <= FEW_TOKENS:
            return function(*arguments)
        return await loop.run_in_executor(self._threads, function, *arguments)


def at_once(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """
    What a coroutine returns that never waits, in any thread. (transformers' handlers are coroutines that do all work
    on a text between their few waits.)

    Raises:
        RuntimeError: if it waits.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        found: Result = end.value
        return found
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits, but must not.")
