"""The HTTP side of many replicas: passes requests on, and repeats those whose replica has died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from transformers.utils import logging

from ..serving.error_answers import error_answer
from ..serving.errors import RequestFailed, error_in_stream
from ..serving.in_process import Message
from ..serving.stream_ends import DONE, event, until_failed
from .prefixes import keys_of


logger = logging.get_logger(__name__)

MOST_TRIES = 5
"""Replicas that may die of one request, or while they have it."""
SECONDS_TO_RETRY = 0.2
"""Seconds before the second try; twice as long before each further one."""
EVENT_STREAM = b"text/event-stream"
GONE = "The replica that wrote the text has ended. Send the request again."


@dataclass(frozen=True)
class Asked:
    """
    A request, as a replica gets it.

    Args:
        method (`str`), path (`str`), query (`bytes`), headers (`list[tuple]`), content (`bytes`): as in HTTP.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    content: bytes


class Front:
    """
    Answers requests by replicas. A request whose replica dies is sent to another one as long as its client has nothing
    of the answer; a stream that has begun ends with an event of the error.

    Args:
        ask (`Callable`): sends a request, with the keys of its text, to a replica; gives the messages of its answer.
        gone (`type[Exception]`): what is raised in the place of a message when the replica has died.
    """

    def __init__(self, ask: Callable[[list[str], Asked], AsyncGenerator[Message, None]], *gone: type[Exception]):
        self._ask, self._gone = ask, gone

    async def answer(self, request: Request) -> Response:
        """The answer to a request."""
        content, path = await request.body(), request.url.path
        scope = request.scope
        asked = Asked(request.method, path, scope["query_string"], list(scope["headers"]), content)
        keys = keys_of(content) if request.method == "POST" else []
        for tried in range(MOST_TRIES):
            if tried:
                await asyncio.sleep(SECONDS_TO_RETRY * 2 ** (tried - 1))
            try:
                return await self._begun(asked, self._ask(keys, asked))
            except self._gone as error:
                logger.warning(f"A replica has died with a request, which is repeated: {type(error).__name__}.")
        return error_answer(503, "engine_error", f"{MOST_TRIES} replicas have died with this request.")

    async def _begun(self, asked: Asked, messages: AsyncGenerator[Message, None]) -> Response:
        """An answer that is complete, or a stream that has begun."""
        start = await anext(messages)
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        if any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in headers):
            first: Message = await anext(messages, {})
            ended = until_failed if asked.path.endswith("/responses") else _until_gone
            response: Response = StreamingResponse(ended(self._events(first, messages)), start["status"])
        else:
            async with aclosing(messages):
                body = b"".join([message.get("body", b"") async for message in messages])
            response = Response(body, start["status"])
            headers.append((b"content-length", b"%d" % len(body)))
        response.raw_headers = headers
        return response

    async def _events(self, first: Message, messages: AsyncGenerator[Message, None]) -> AsyncGenerator[str, None]:
        async with aclosing(messages):
            try:
                yield first.get("body", b"").decode()
                async for message in messages:
                    yield message.get("body", b"").decode()
            except self._gone as error:
                raise RequestFailed(GONE, is_its_own=False) from error


async def _until_gone(events: Any) -> AsyncGenerator[str, None]:
    """The events of a stream of a chat or completion, which ends itself unless its replica dies."""
    async with aclosing(events):
        try:
            async for text in events:
                yield text
        except RequestFailed as error:
            yield event({"error": error_in_stream(error)})
            yield DONE
