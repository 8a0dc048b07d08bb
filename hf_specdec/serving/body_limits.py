"""The most bytes of a request's body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .error_answers import error_answer
from .work_pool import body_size


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class BodyLimit:
    """
    ASGI middleware that reads a request's body before the application gets it, and answers with 413 as soon as that is
    known to be too long: by its `Content-Length`, without reading it, or else when so much has come.

    Args:
        app: the application.
        most_bytes (`int`): most bytes of a body.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], most_bytes: int):
        self.app, self._most = app, most_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(value.isdigit() and int(value) > self._most for value in announced):
            return await self._refuse(scope, receive, send)
        parts, length, has_more = [], 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            has_more = message.get("more_body", False)
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > self._most:
                return await self._refuse(scope, receive, send)
        whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
        del parts
        body_size.set(length)

        async def read() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, read, send)

    async def _refuse(self, scope: Message, receive: Receive, send: Any) -> None:
        reason = (
            f"The body is longer than the {self._most} bytes that this server takes. Send less, or start the server "
            "with a larger `--max-body-bytes`."
        )
        await error_answer(413, "invalid_request_error", reason)(scope, receive, send)
