"""Who may send requests: API keys, and pages of other origins."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from .error_answers import error_answer


Message = MutableMapping[str, Any]

FOR_ALL = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Paths that are answered without a key: they tell nothing of what is asked."""


class ApiKeys:
    """
    ASGI middleware that answers with 401, before it reads a body, unless `Authorization: Bearer …` has a key.

    Args:
        app: the application.
        keys (`list[str]`): the keys.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], keys: list[str]):
        self.app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in FOR_ALL or self._has_key(scope):
            return await self.app(scope, receive, send)
        reason = (
            "The API key is missing or wrong. Send one that the server was started with: `Authorization: Bearer …`."
        )
        answer = error_answer(401, "authentication_error", reason)
        answer.headers["WWW-Authenticate"] = "Bearer"
        await answer(scope, receive, send)

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        fits = [hmac.compare_digest(key.strip(), one) for one in self._keys]  # all of them: it takes the same time
        return kind.lower() == b"bearer" and any(fits)


def add_access(app: FastAPI, api_keys: list[str], origins: list[str]) -> None:
    """
    Adds the checks of an application, around all others.

    Args:
        app (`FastAPI`): the application.
        api_keys (`list[str]`): keys of which requests need one; empty: they need none.
        origins (`list[str]`): origins whose pages may send requests; `*` is any.
    """
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    if origins:  # outermost, so that refusals can be read, too, and preflights need no key
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
