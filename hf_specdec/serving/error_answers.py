"""Answers of the HTTP server to requests that fail."""

from __future__ import annotations

import queue
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import CBWorkerDeadError

from .engine.client import EngineClient
from .errors import RequestFailed, RequestRefused, TimedOut, UnknownModel, error_object, without_details


def add_error_handlers(app: FastAPI, engine: EngineClient) -> None:
    """
    Adds the answers to errors, in one form: 4xx for what is found wrong with a request, 5xx for other failures.

    Args:
        app (`FastAPI`): the application.
        engine (`EngineClient`): runs the requests; after its end all of them fail because of that.
    """

    def failed(request: Request, error: Exception) -> JSONResponse:
        if engine.fatal_error is not None:
            return error_answer(503, "engine_error", str(engine.fatal_error))
        return error_answer(500, "server_error", without_details(error))

    handlers: dict[type[Exception], Any] = {
        UnknownModel: _unknown_model,
        RequestRefused: _refused,
        RequestFailed: _failed,
        queue.Full: _busy,
        TimedOut: _late,
        RequestValidationError: _malformed,
        HTTPException: _refused_by_transformers,
        CBWorkerDeadError: failed,
        Exception: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _refused(request: Request, error: Exception) -> JSONResponse:
    return error_answer(400, "invalid_request_error", str(error))


def _unknown_model(request: Request, error: Exception) -> JSONResponse:
    return error_answer(404, "invalid_request_error", str(error))


def _malformed(request: Request, error: RequestValidationError) -> JSONResponse:
    """The answer to a body that is no JSON object."""
    reasons = [str(one.get("msg")) for one in error.errors()] or [str(error)]
    return error_answer(400, "invalid_request_error", f"The body must be a JSON object: {reasons[0]}.")


def _refused_by_transformers(request: Request, error: HTTPException) -> JSONResponse:
    """transformers' own refusals and unknown paths, in the form of all other errors."""
    status, reason = (400 if error.status_code == 422 else error.status_code), str(error.detail)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    response = error_answer(status, kind, reason)
    response.headers.update(error.headers or {})
    return response


def _busy(request: Request, error: Exception) -> JSONResponse:
    return error_answer(503, "overloaded_error", str(error))


def _late(request: Request, error: Exception) -> JSONResponse:
    return error_answer(504, "timeout_error", str(error))


def _failed(request: Request, error: RequestFailed) -> JSONResponse:
    return _refused(request, error) if error.is_its_own else error_answer(500, "server_error", str(error))


SECONDS_TO_RETRY = 1
"""Seconds after which clients may try again what was answered with 503."""


def error_answer(status: int, kind: str, message: str) -> JSONResponse:
    """The answer to a request that failed; see `error_object`."""
    headers = {"Retry-After": str(SECONDS_TO_RETRY)} if status == 503 else None
    return JSONResponse({"error": error_object(status, kind, message)}, status_code=status, headers=headers)
