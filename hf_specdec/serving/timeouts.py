"""The most seconds that an answer may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any

from .choices import cancel_all
from .errors import TimedOut


class Deadline:
    """
    The end of the time that an answer may take, from now on. What waits then is cancelled, and so is the request.

    Args:
        seconds (`float`, *optional*): None: any time.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._when = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def wait(self, for_it: Awaitable[Any]) -> Any:
        """
        Waits for something.

        Raises:
            TimedOut: if it takes too long.
        """
        try:
            async with asyncio.timeout_at(self._when):
                return await for_it
        except TimeoutError:
            cancel_all()
            raise TimedOut(
                f"The answer took longer than the {self._seconds:g} seconds that this server allows. Ask for fewer "
                "tokens, or come back when it is less busy."
            ) from None

    async def events(self, texts: Any) -> AsyncGenerator[str, None]:
        """The events of a stream, until it takes too long; see `wait`."""
        async with aclosing(texts):
            while True:
                try:
                    yield await self.wait(anext(texts))
                except StopAsyncIteration:
                    return
