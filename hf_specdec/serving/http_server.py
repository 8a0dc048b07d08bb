"""The HTTP server: uvicorn, with limits of connections, which ends within seconds although requests are open."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn

from .engine.client import EngineClient
from .http_protocol import LimitedProtocol


SECONDS_TO_FINISH = 5.0
"""Seconds that open requests have to finish when the server is asked to end."""
SECONDS_TO_ANSWER = 10
"""Seconds after these within which the failed requests' answers must have been sent."""


class HttpServer(uvicorn.Server):
    """
    A uvicorn server whose open requests fail a while after the first signal to end, and at once after the second, so
    that their connections close.

    Args:
        config (`uvicorn.Config`): see uvicorn.
        engine (`EngineClient`): has the open requests.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient):
        config.http = LimitedProtocol
        super().__init__(config)
        config.timeout_graceful_shutdown = int(SECONDS_TO_FINISH) + SECONDS_TO_ANSWER
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        failing = asyncio.get_running_loop().call_later(SECONDS_TO_FINISH, self._engine.fail_open)
        try:
            await super().shutdown(sockets)
        finally:
            failing.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and self._loop is not None and not self._engine.is_gone:
            self._loop.call_soon_threadsafe(self._engine.fail_open)
        else:
            super().handle_exit(sig, frame)
