"""Cancelling the work for clients that have disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .generation import OneRequest, asked_for


Message = MutableMapping[str, Any]


class CancelOnDisconnect:
    """
    ASGI middleware that cancels the application's work on a request, and its requests to the engine, when the client
    disconnects. (Starlette cancels only streams that have begun; other responses would be computed to the end.)

    Args:
        app: the application.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        messages: asyncio.Queue[Message] = asyncio.Queue()
        asked: list[OneRequest] = []
        asked_for.set(asked)
        work = asyncio.ensure_future(self.app(scope, messages.get, send))

        async def watch() -> None:
            while (message := await receive())["type"] != "http.disconnect":
                messages.put_nowait(message)
            messages.put_nowait(message)
            work.cancel()

        watching = asyncio.ensure_future(watch())
        is_answered = False
        try:
            await work
            is_answered = not watching.done()
        except asyncio.CancelledError:
            if not (watching.done() and not watching.cancelled()):
                raise  # the server itself is ending
        finally:
            watching.cancel()
            work.cancel()
            for request in [] if is_answered else asked:
                request.cancel()
