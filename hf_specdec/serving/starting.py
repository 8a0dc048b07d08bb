"""The server while it starts: it listens, tells how far it is, and takes no requests yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from .access import add_access
from .engine.client import EngineClient
from .error_answers import error_answer
from .health import add_health, add_version, stage_of
from .http_server import HttpServer


App = Callable[..., Awaitable[None]]

SECONDS_TO_TELL = 1.0
"""Seconds for which a server that cannot start says so before it ends."""
SECONDS_TO_RETRY = 5
"""Seconds after which clients may ask again a server that starts."""


class StartingApp:
    """
    An ASGI application that says that it starts, until it gets another one in its place.

    Args:
        engine (`EngineClient`): loads its models.
        api_keys (`list[str]`, *optional*), origins (`list[str]`, *optional*): see `add_access`.
    """

    def __init__(self, engine: EngineClient, api_keys: list[str] | None = None, origins: list[str] | None = None):
        self._own = self.app = _own_app(engine, api_keys or [], origins or [])
        """What answers: at first only that the server starts."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        app = self._own if scope["type"] == "lifespan" else self.app
        await app(scope, receive, send)


def _own_app(engine: EngineClient, api_keys: list[str], origins: list[str]) -> FastAPI:
    app = FastAPI(openapi_url=None)
    add_health(app, engine, takes_requests=False)
    add_version(app)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response("", media_type=CONTENT_TYPE_LATEST)

    async def not_yet(request: Request) -> JSONResponse:
        if engine.fatal_error is not None:
            return error_answer(503, "engine_error", str(engine.fatal_error))
        answer = error_answer(503, "engine_error", f"The server starts. {stage_of(engine)} Try again in some seconds.")
        answer.headers["Retry-After"] = str(SECONDS_TO_RETRY)
        return answer

    app.router.add_route("/{path:path}", not_yet, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    add_access(app, api_keys, origins)
    return app


@contextmanager
def starting(
    app: StartingApp,
    engine: EngineClient,
    server: HttpServer,
    make_app: Callable[[], Any],
    tell: Callable[[str], None] = lambda line: None,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """
    A context, around `server.run()`, in which a thread waits for the engine, and lets the server take requests. If the
    engine cannot start, `/health` says why for a moment, and the server ends.

    Args:
        app (`StartingApp`): the server's application.
        engine (`EngineClient`): loads its models.
        server (`HttpServer`): the server.
        make_app (`Callable`): makes the application that takes requests, once the engine is loaded.
        tell (`Callable`, *optional*): called with the line that says that the server is ready.
        prepare (`Callable`, *optional*): called first, while the engine is loaded.

    Raises:
        StartError: if the engine cannot start.
    """
    errors: list[BaseException] = []

    def start() -> None:
        try:
            prepare()
            engine.wait_until_loaded()
            app.app = make_app()
            engine.wait_until_warm()
            tell(engine.stage)
        except BaseException as error:
            if server.should_exit:
                return  # which has ended the engine
            errors.append(error)
            engine.fail_open(str(error))
            time.sleep(SECONDS_TO_TELL)
            server.should_exit = True

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    yield
    if errors:
        raise errors[0]
