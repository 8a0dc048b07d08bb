"""The JSON of large bodies, which is read beside the event loop."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute, request_response

from .errors import RequestRefused
from .work_pool import WorkPool


MOST_VALUES = 300_000
"""
Most values of a body, for which Python's parser needs up to 0.2 seconds, in which no other thread runs. Enough for a
`logit_bias` of all tokens of a large vocabulary.
"""


def check_number_of_values(content: bytes) -> None:
    """
    Checks how many values a JSON text has, before they are made.

    Raises:
        RequestRefused: if there are more than `MOST_VALUES`.
    """
    number, at, length = 1, 0, len(content)
    while at < length:
        quote = content.find(b'"', at)
        end = length if quote < 0 else quote
        number += sum(content.count(sign, at, end) for sign in (b",", b"[", b"{"))
        if number > MOST_VALUES:
            raise RequestRefused(f"The body has more than {MOST_VALUES} values: arrays, objects and what is in them.")
        at = length if quote < 0 else _end_of_string(content, quote) + 1


def _end_of_string(content: bytes, quote: int) -> int:
    """Where a string ends that begins with this quote: at its other one, or at the end of the text."""
    end = content.find(b'"', quote + 1)
    while end >= 0:
        first = end
        while content[first - 1] == ord("\\"):
            first -= 1
        if (end - first) % 2 == 0:
            return end
        end = content.find(b'"', end + 1)
    return len(content)


class _LargeRequest(Request):
    """A request whose JSON is read by a pool."""

    def __init__(self, request: Request, work: WorkPool):
        super().__init__(request.scope, request.receive)
        self._work = work

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await self._work.run(json.loads, await self.body())
        return self._json


def read_json_with(app: FastAPI, work: WorkPool) -> None:
    """
    Makes a pool read the JSON of the requests to all routes.

    Args:
        app (`FastAPI`): the application, with all of its routes.
        work (`WorkPool`): the pool.
    """
    for route in app.router.routes:
        if isinstance(route, APIRoute):
            route.app = _reading(route, work)


def _reading(route: APIRoute, work: WorkPool) -> Any:
    handler = route.get_route_handler()

    async def handle(request: Request) -> Any:
        large = _LargeRequest(request, work)
        await work.run(check_number_of_values, await large.body())
        return await handler(large)

    return request_response(handle)
