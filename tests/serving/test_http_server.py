"""The HTTP server's end, with streams that nobody else would end."""

from __future__ import annotations

import asyncio
import http.client
import logging
import signal
import threading
import time
from typing import Any

import pytest


pytest.importorskip("uvicorn")

import uvicorn

from hf_specdec.serving import http_server
from hf_specdec.serving.http_server import HttpServer


class Engine:
    """Stands for a client of the engine, whose requests end when they fail."""

    def __init__(self) -> None:
        self.is_gone, self.failed = False, asyncio.Event()

    def fail_open(self) -> None:
        self.is_gone = True
        self.failed.set()

    async def app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """A stream that has begun, and goes on until its request fails."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        await self.failed.wait()
        await send({"type": "http.response.body", "body": b"failed"})


@pytest.mark.parametrize("number_of_signals", [1, 2])
def test_open_streams_fail_when_the_server_ends(
    number_of_signals: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while; at once when asked again."""
    monkeypatch.setattr(http_server, "SECONDS_TO_FINISH", 0.5 if number_of_signals == 1 else 60.0)
    engine = Engine()
    server = HttpServer(uvicorn.Config(engine.app, port=0, log_config=None, interface="asgi3"), engine)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    with caplog.at_level(logging.INFO):
        thread.start()
        while not server.started:
            time.sleep(0.01)
        (listening,) = server.servers[0].sockets[:1]
        connection = http.client.HTTPConnection(*listening.getsockname()[:2], timeout=30)
        connection.request("GET", "/")
        response = connection.getresponse()
        assert response.read(6) == b"begun "
        for _ in range(number_of_signals):
            server.handle_exit(signal.SIGINT, None)
            time.sleep(0.3)
        assert response.read() == b"failed"
        thread.join(10)
        assert not thread.is_alive()
    assert not [record for record in caplog.records if record.exc_info]
