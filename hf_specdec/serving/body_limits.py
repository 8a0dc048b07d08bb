"""The most bytes of a request's body, and of all bodies at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import Response

from .error_answers import error_answer
from .work_pool import body_size


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

MOST_BODIES = 16
"""Bodies of the largest size that may be held at once."""
ALWAYS_READ = 64 * 2**10
"""Bytes of a body that are read however much is held: as many as uvicorn keeps of each connection in any case."""


class BodyLimit:
    """
    ASGI middleware that reads a request's body before the application gets it. It answers with 413 as soon as the body
    is known to be too long: by its `Content-Length`, without reading it, or else when so much has come. It answers
    with 503 when too much is held of all bodies that are being read, or whose answers have not begun.

    Args:
        app: the application.
        most_bytes (`int`): most bytes of a body. Of all bodies, `MOST_BODIES` times as many are held at once.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], most_bytes: int):
        self.app, self._most = app, most_bytes
        self._held = 0
        """Bytes of all bodies that are held."""

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = bytearray()
        try:
            refusal = await self._read(scope, receive, body)
            if refusal is not None:
                return await refusal(scope, receive, send)
            await self._answer(scope, receive, send, body)
        except _Disconnected:
            return
        finally:
            self._let_go(body)

    async def _read(self, scope: Message, receive: Receive, body: bytearray) -> Response | None:
        """Reads the body to its end, or to where it is refused: then returns the answer."""
        announced = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(value.isdigit() and int(value) > self._most for value in announced):
            return self._too_long()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            has_more, part = message.get("more_body", False), message.get("body", b"")
            body += part
            self._held += len(part)
            if len(body) > self._most:
                return self._too_long()
            if len(body) > ALWAYS_READ and self._held > MOST_BODIES * self._most:
                return error_answer(503, "overloaded_error", "The server holds many large bodies. Come back later.")
        return None

    async def _answer(self, scope: Message, receive: Receive, send: Any, body: bytearray) -> None:
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        body_size.set(len(body))

        async def read() -> Message:
            return whole.pop() if whole else await receive()

        async def begin(message: Message) -> None:
            self._let_go(body)
            await send(message)

        await self.app(scope, read, begin)

    def _let_go(self, body: bytearray) -> None:
        self._held -= len(body)
        body.clear()

    def _too_long(self) -> Response:
        reason = (
            f"The body is longer than the {self._most} bytes that this server takes. Send less, or start the server "
            "with a larger `--max-body-bytes`."
        )
        return error_answer(413, "invalid_request_error", reason)


class _Disconnected(Exception):
    """Raised where a client has gone before the end of its body."""
