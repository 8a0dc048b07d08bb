"""Requests to the application in its own process, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import aclosing
from typing import Any


Message = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]
JSON = ((b"content-type", b"application/json"),)


async def messages_of(
    app: App,
    path: str,
    content: bytes = b"",
    *,
    method: str = "POST",
    query: bytes = b"",
    headers: Iterable[tuple[bytes, bytes]] = JSON,
) -> AsyncGenerator[Message, None]:
    """
    The ASGI messages of the answer to a request: its start, with status and headers, and the parts of its body. Closed
    before their end, the generator cancels the request, as a client does that disconnects.

    Args:
        app (`Callable`): the application.
        path (`str`), content (`bytes`), method (`str`), query (`bytes`), headers (`Iterable[tuple]`): the request.

    Raises:
        Exception: what the application raises before it answers.
    """
    whole: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    sent: asyncio.Queue[Message] = asyncio.Queue(maxsize=1)  # so that a slow reader holds back the application

    async def receive() -> Message:
        if not whole:
            await asyncio.get_running_loop().create_future()  # never done: nobody disconnects
        return whole.pop()

    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("localhost", 1),
        "root_path": "",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": list(headers),
    }
    work = asyncio.ensure_future(app(scope, receive, sent.put))
    try:
        has_begun, has_more = False, True
        while has_more:
            taking = asyncio.ensure_future(sent.get())
            await asyncio.wait({work, taking}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done() and sent.empty():
                taking.cancel()
                if not has_begun:
                    await work
                return
            message = await taking
            has_begun = True
            has_more = message["type"] == "http.response.start" or message.get("more_body", False)
            yield message
        await asyncio.wait({work})
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def answer_to(app: App, path: str, content: bytes) -> tuple[int, bytes]:
    """Status and body of the application's answer to a request with a JSON body."""
    status, body = 0, bytearray()
    async with aclosing(messages_of(app, path, content)) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                status = message["status"]
            body += message.get("body", b"")
    return status, bytes(body)
