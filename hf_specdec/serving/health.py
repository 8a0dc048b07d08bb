"""`/health` and `/version`: whether requests are served, and by what."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from .defaults import STALL_SECONDS
from .engine.client import EngineClient
from .error_answers import SECONDS_TO_RETRY


def add_health(
    app: FastAPI, engine: EngineClient, stall_seconds: float = STALL_SECONDS, takes_requests: bool = True
) -> None:
    """
    Replaces the route `/health`. It answers in the event loop, so that no other request can keep it waiting for a
    thread, and asks the engine nothing.

    Args:
        app (`FastAPI`): the application.
        engine (`EngineClient`): runs the requests.
        stall_seconds (`float`, *optional*, defaults to 60): seconds after which an engine that has work and ends no
            forward is unhealthy.
        takes_requests (`bool`, *optional*, defaults to `True`): whether the application has the routes of requests.
    """
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != "/health"]

    @app.get("/ping", responses={503: {"description": "As `/health`."}})
    @app.get("/health", responses={503: {"description": "The engine starts, has ended, or its forwards do not end."}})
    async def health() -> JSONResponse:
        stalled = engine.seconds_stalled
        if engine.fatal_error is not None:
            reason = "cb_worker_dead" if engine.is_warm else "not_started"
            return _not_ready("failed", reason=reason, message=str(engine.fatal_error))
        if not (takes_requests and engine.is_warm):
            return _not_ready("starting", stage=stage_of(engine))
        if stalled > stall_seconds:
            told = f"Requests wait, and for {stalled:.0f} seconds no forward has ended."
            return _not_ready("failed", reason="stalled", message=told)
        return JSONResponse({"status": "ready"})


def stage_of(engine: EngineClient) -> str:
    """What is done at the start of a server that takes no requests yet."""
    return "The engine is ready; its routes are added." if engine.is_warm else engine.stage


def add_version(app: FastAPI) -> None:
    """Adds the route `/version`."""

    @app.get("/version")
    def about() -> JSONResponse:
        return JSONResponse({"version": version("hf-specdec")})


def _not_ready(status: str, **why: str) -> JSONResponse:
    return JSONResponse({"status": status} | why, status_code=503, headers={"Retry-After": str(SECONDS_TO_RETRY)})
