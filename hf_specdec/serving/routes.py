"""The routes whose bodies we read ourselves, in place of transformers' own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from .requests import parsed


_HANDLERS = {
    "/v1/chat/completions": "chat_handler",
    "/v1/completions": "completion_handler",
    "/v1/responses": "response_handler",
}
_NOT_OURS = ("/v1/systemone", "/v1/audio/transcriptions")
"""Routes that need the model itself, which answer nothing but that, and are not described."""


def add_body_routes(app: FastAPI, handlers: dict[str, Any]) -> None:
    """
    Replaces the routes for texts by those that read bodies with limits, and leaves others out of the description.

    Args:
        app (`FastAPI`): the application.
        handlers (`dict`): transformers' handlers, by the names that `build_server` gives them.
    """

    def answer(handler: Any) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            body = parsed(await request.body(), request.headers.get("content-type"))
            return await handler.handle_request(body, request.state.request_id)

        return answered

    for path, name in _HANDLERS.items():
        replace_route(app, path, answer(handlers[name]))
    for route in app.router.routes:
        if getattr(route, "path", None) in _NOT_OURS:
            route.include_in_schema = False  # type: ignore[attr-defined]


def replace_route(app: FastAPI, path: str, answer: Callable[[Request], Awaitable[Response]]) -> None:
    """Puts a route for POST in the place of those with its path."""
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != path]
    app.post(path, name=path.strip("/").replace("/", "_"), response_model=None)(answer)
