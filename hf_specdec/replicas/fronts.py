"""The front, as an actor of Ray Serve."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError

from ..serving.body_limits import BodyLimit
from ..serving.defaults import MOST_BODY_BYTES
from ..serving.in_process import Message
from .front import Asked, Front


_pages = FastAPI(openapi_url=None)
_pages.add_middleware(BodyLimit, most_bytes=MOST_BODY_BYTES)


@serve.ingress(_pages)
class HttpFront:
    """
    Takes HTTP requests.

    Args:
        replicas (`DeploymentHandle`), board (`DeploymentHandle`): the other deployments.
    """

    def __init__(self, replicas: Any, board: Any):
        self._replicas, self._board = replicas.options(stream=True), board
        self._front = Front(self._ask, RayActorError)

    @_pages.get("/metrics")
    async def metrics(self) -> Response:
        return Response(await self._board.page.remote(), media_type=CONTENT_TYPE_LATEST)

    @_pages.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(self, request: Request) -> Response:
        return await self._front.answer(request)

    async def _ask(self, keys: list[str], asked: Asked) -> AsyncGenerator[Message, None]:
        answer = self._replicas.answer.remote(keys, asked)
        try:
            async for message in answer:
                yield message
        finally:
            answer.cancel()  # does nothing to one that has ended
