"""The FastAPI application: transformers' routes and handlers in front of our engine."""

from __future__ import annotations

import inspect
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.server import build_server

from ..verification.log_probabilities import Mode
from .access import add_access
from .body_limits import BodyLimit
from .defaults import MOST_BODY_BYTES, NO_IMAGES, STALL_SECONDS
from .disconnects import CancelOnDisconnect
from .engine.client import EngineClient
from .error_answers import add_error_handlers, error_answer
from .generation import SpeculativeState
from .handlers import Chats, Completions, Responses
from .health import add_health, add_version
from .images import ImageReader
from .metrics import registry_of
from .one_model import OneModel
from .requests import LoadModelBody, checked, describe
from .routes import add_body_routes, body_of, replace_route
from .tokens import TokenRoutes


def build_app(
    engine: EngineClient,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
    *,
    stall_seconds: float = STALL_SECONDS,
    max_body_bytes: int = MOST_BODY_BYTES,
    images: ImageReader | str = NO_IMAGES,
    logprobs_mode: Mode = "raw",
    answer_seconds: float | None = None,
    api_keys: list[str] | None = None,
    origins: list[str] | None = None,
) -> FastAPI:
    """
    transformers' server for one model, with `/metrics` beside its routes.

    Args:
        engine (`EngineClient`): runs the requests; the caller ends it.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
        model_name (`str`): the model's name for clients.
        stall_seconds (`float`, *optional*, defaults to 60): see `add_health`.
        max_body_bytes (`int`, *optional*, defaults to 4 MiB): most bytes of a request's body; see `BodyLimit`.
        images (`ImageReader` or `str`, *optional*): reads images in messages; or the reason why there may be none.
        logprobs_mode (`str`, *optional*, defaults to `"raw"`): which log-probabilities are told; see `LogprobOptions`.
        answer_seconds (`float`, *optional*): most seconds that an answer may take; None: any number.
        api_keys (`list[str]`, *optional*), origins (`list[str]`, *optional*): see `add_access`.
    """
    models = OneModel(model_name, engine.model, tokenizer, images)
    models.answer_seconds = answer_seconds
    state = SpeculativeState(engine, models.work, logprobs_mode)
    handlers: dict[str, Any] = {
        "chat_handler": Chats(models, state),
        "completion_handler": Completions(models, state),
        "response_handler": Responses(models, state),
    }
    others = [name for name in inspect.signature(build_server).parameters if name.endswith("_handler")]
    # Those that need the model itself are never called; see `add_body_routes`.
    app = build_server(models, generation_state=state, **dict.fromkeys(others) | handlers)
    _add_routes(app, models)
    TokenRoutes(
        tokenizer,
        models.facts,
        engine.model.longest_text,
        handlers["chat_handler"]._resolve_model,
        handlers["chat_handler"].prompt_of,
        models.prompts.tokens_of,
        models.work,
    ).add_to(app)
    add_body_routes(app, handlers, models.work)
    _add_metrics(app, engine, model_name)
    describe(app, models.facts)
    add_health(app, engine, stall_seconds)
    add_version(app)
    add_error_handlers(app, engine)
    app.add_middleware(CancelOnDisconnect)
    app.add_middleware(BodyLimit, most_bytes=max_body_bytes)
    add_access(app, api_keys or [], origins or [])
    return app


def _add_routes(app: FastAPI, models: OneModel) -> None:
    """Routes about the one model."""

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> JSONResponse:
        found = models.id_of(name)
        return JSONResponse(next(one for one in models.list_models() if one["id"] == found))

    async def load_model(request: Request) -> Response:
        body = checked(LoadModelBody, await body_of(request, models.work), models.facts)
        return StreamingResponse(models.load_model_streaming(models.id_of(body.model)), media_type="text/event-stream")

    replace_route(app, "/load_model", load_model)


def _add_metrics(app: FastAPI, engine: EngineClient, model_name: str) -> None:
    registry = registry_of(engine, model_name)

    @app.get("/metrics")
    def metrics() -> Response:
        if engine.fatal_error is not None:
            return error_answer(503, "engine_error", str(engine.fatal_error))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
