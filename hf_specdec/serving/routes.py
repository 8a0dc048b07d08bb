"""The routes whose bodies we read ourselves, in place of transformers' own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from .errors import RequestRefused
from .requests import parsed
from .work_pool import WorkPool


_HANDLERS = {
    "/v1/chat/completions": "chat_handler",
    "/v1/completions": "completion_handler",
    "/v1/responses": "response_handler",
}
_NOT_OURS = ("/v1/systemone", "/v1/audio/transcriptions")
"""Routes that need the model itself. They refuse everything, without reading it, and are not described."""


def add_body_routes(app: FastAPI, handlers: dict[str, Any], work: WorkPool) -> None:
    """
    Replaces the routes for texts by those that read bodies with limits, and others by refusals.

    Args:
        app (`FastAPI`): the application.
        handlers (`dict`): transformers' handlers, by the names that `build_server` gives them.
        work (`WorkPool`): reads the JSON of large bodies.
    """

    def answer(handler: Any) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            return await handler.handle_request(await body_of(request, work), request.state.request_id)

        return answered

    async def refuse(request: Request) -> Response:
        raise RequestRefused("This server is for chat, completions and responses. Others need `transformers serve`.")

    for path, name in _HANDLERS.items():
        replace_route(app, path, answer(handlers[name]))
    for other in {getattr(route, "path", "") for route in app.router.routes} & set(_NOT_OURS):
        replace_route(app, other, refuse, include_in_schema=False)


async def body_of(request: Request, work: WorkPool) -> dict[str, Any]:
    """
    The body of a request; see `parsed`.

    Args:
        request (`Request`): the request.
        work (`WorkPool`): reads it if it is large.
    """
    return await work.run(parsed, await request.body(), request.headers.get("content-type"))


def replace_route(
    app: FastAPI, path: str, answer: Callable[[Request], Awaitable[Response]], include_in_schema: bool = True
) -> None:
    """Puts a route for POST in the place of those with its path."""
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != path]
    name = path.strip("/").replace("/", "_")
    app.post(path, name=name, response_model=None, include_in_schema=include_in_schema)(answer)
