"""The last events of streams, as OpenAI's clients expect them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from .errors import error_in_stream


DONE = "data: [DONE]\n\n"
"""The last event of a stream of a chat or completion."""


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


async def until_done(events: Any) -> AsyncGenerator[str, None]:
    """
    The events of a streamed chat or completion. If one cannot be made, an event `{"error": …}` follows; the last one
    is `[DONE]` in any case.
    """
    async with aclosing(events):
        try:
            async for text in events:
                if text:
                    yield text
        except Exception as error:
            yield event({"error": error_in_stream(error)})
    yield DONE


async def until_failed(events: Any) -> AsyncGenerator[str, None]:
    """
    The events of a streamed response. If one cannot be made, an event `error` follows, and the last one is
    `response.failed`. The error is told twice in the first of these: OpenAI's description has the message beside the
    type, while its clients look for it in `error`.
    """
    number, first = 0, ""
    async with aclosing(events):
        try:
            async for text in events:
                number, first = number + text.count("\n\n"), first or text
                yield text
        except Exception as error:
            reason = error_in_stream(error)
            message, code = reason["message"], reason["type"]
            told = {"message": message, "code": code, "param": None, "error": {**reason, "param": None}}
            yield event({"type": "error", "sequence_number": number, **told})
            response = _begun(first) | {"status": "failed", "error": {"code": "server_error", "message": message}}
            yield event({"type": "response.failed", "sequence_number": number + 1, "response": response})


def _begun(events: str) -> dict[str, Any]:
    """The response in the first of these events, which creates it."""
    if not events:
        return {}
    response: dict[str, Any] = json.loads(events.partition("\n\n")[0].removeprefix("data: "))["response"]
    return response
