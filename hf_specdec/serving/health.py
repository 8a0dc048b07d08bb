"""`/health`: whether requests are served."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from .engine.client import EngineClient
from .error_answers import SECONDS_TO_RETRY


def add_health(app: FastAPI, engine: EngineClient, stall_seconds: float) -> None:
    """
    Replaces the route `/health`. It answers in the event loop, so that no other request can keep it waiting for a
    thread, and asks the engine nothing.

    Args:
        app (`FastAPI`): the application.
        engine (`EngineClient`): runs the requests.
        stall_seconds (`float`): seconds after which an engine that has work and ends no forward is unhealthy.
    """
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != "/health"]

    @app.get("/ping", responses={503: {"description": "As `/health`."}})
    @app.get(
        "/health", responses={503: {"description": "The engine warms up, has ended, or its forwards do not end."}}
    )
    async def health() -> JSONResponse:
        stalled = engine.seconds_stalled
        if engine.fatal_error is not None:
            return _not_ready("failed", reason="cb_worker_dead", message=str(engine.fatal_error))
        if not engine.is_warm:
            return _not_ready("starting", message="The engine warms up. Requests are taken, and served after it.")
        if stalled > stall_seconds:
            told = f"Requests wait, and for {stalled:.0f} seconds no forward has ended."
            return _not_ready("failed", reason="stalled", message=told)
        return JSONResponse({"status": "ready"})


def _not_ready(status: str, **why: str) -> JSONResponse:
    return JSONResponse({"status": status} | why, status_code=503, headers={"Retry-After": str(SECONDS_TO_RETRY)})
