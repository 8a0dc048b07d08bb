"""The FastAPI application: transformers' routes and handlers in front of our engine."""

from __future__ import annotations

import inspect
import queue
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server

from .disconnects import CancelOnDisconnect
from .engine.client import EngineClient
from .engine.messages import Served
from .generation import SpeculativeState, asked_for
from .metrics import registry_of
from .stop_strings import check_number_and_length, checked_stop_strings, trimmed
from .streams import QuickChunks


class OneModel(ModelManager):
    """
    A model manager with a single model, which the engine has already loaded.

    Args:
        name (`str`): the model's name for clients.
        model (`Served`): config and generation config of the model, as the engine reports them.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
    """

    def __init__(self, name: str, model: Served, tokenizer: PreTrainedTokenizerBase):
        self._loaded = model, tokenizer
        super().__init__(force_model=name)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, PreTrainedTokenizerBase]:
        return self._loaded

    def get_gen_models(self, *_: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "hf-specdec"}]


class _OwnRequests:
    """
    A mixin for transformers' handlers: requests have options of their own, including those that the handlers ignore.
    The response is sent when the engine has admitted the request, so that a refused one gets an HTTP error status.
    """

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        handler: Any = super()  # of the handler with this mixin
        response = await handler.handle_request(body, request_id)
        for request in asked_for.get() or ():
            await request.admitted()
        return response

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        others = {name: value for name, value in body.items() if name != "seed"}  # it would seed all of torch
        if others.get("stop") in ("", []):
            del others["stop"]
        handler: Any = super()  # it is mixed into one
        config = handler._build_generation_config(others, model_generation_config, use_cb=use_cb)
        config.use_cache = True
        config.seed = body.get("seed")
        if config.stop_strings is None:
            config.stop_strings = model_generation_config.stop_strings
        elif config.stop_strings != model_generation_config.stop_strings:
            config.stop_strings = checked_stop_strings(config.stop_strings)
            check_number_and_length(config.stop_strings)
        if body.get("temperature") or body.get("top_p") is not None:
            config.do_sample = body.get("temperature") != 0
        return config


_stop_strings: ContextVar[str | list[str] | None] = ContextVar("stop_strings", default=None)
"""Stop strings of the request that the current asyncio task serves."""


class _Chat(_OwnRequests, QuickChunks, ChatCompletionHandler):
    """Chat completions. Stop strings are also cut from answers parsed from tokens (models with response templates)."""

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> GenerationConfig:
        config = super()._build_generation_config(body, *args, **kwargs)
        _stop_strings.set(config.stop_strings)
        return config

    def _build_completion(
        self, request_id: str, content: str, *args: Any, reasoning_content: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        stop_strings = _stop_strings.get()
        content = content and trimmed(content, stop_strings)
        reasoning_content = reasoning_content and trimmed(reasoning_content, stop_strings)
        return super()._build_completion(request_id, content, *args, reasoning_content=reasoning_content, **kwargs)


class _Completion(_OwnRequests, QuickChunks, CompletionHandler):
    pass


class _Response(_OwnRequests, ResponseHandler):
    pass


class _Nothing:
    """A stand-in for handlers that need the model itself: every request to it is an error."""

    async def handle_request(self, *_: Any) -> Response:
        raise ValueError("this server is for chat, completions and responses. Use `transformers serve` for others.")


def build_app(engine: EngineClient, tokenizer: PreTrainedTokenizerBase, model_name: str) -> FastAPI:
    """
    transformers' server for one model, with `/metrics` beside its routes.

    Args:
        engine (`EngineClient`): runs the requests; the caller ends it.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
        model_name (`str`): the model's name for clients.
    """
    models, state = OneModel(model_name, engine.model, tokenizer), SpeculativeState(engine)
    handlers: dict[str, Any] = {
        "chat_handler": _Chat(models, state),
        "completion_handler": _Completion(models, state),
        "response_handler": _Response(models, state),
    }
    others = [name for name in inspect.signature(build_server).parameters if name.endswith("_handler")]
    handlers |= {name: _Nothing() for name in others if name not in handlers}
    app = build_server(models, generation_state=state, **handlers)
    registry = registry_of(engine, model_name)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(ValueError, _refused)
    app.add_exception_handler(TypeError, _refused)
    app.add_exception_handler(queue.Full, _busy)
    app.add_middleware(CancelOnDisconnect)
    return app


def _refused(request: Request, error: Exception) -> JSONResponse:
    return _error(400, "invalid_request_error", error)


def _busy(request: Request, error: Exception) -> JSONResponse:
    return _error(503, "overloaded_error", error)


def _error(status: int, kind: str, error: Exception) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error), "type": kind, "code": status}}, status_code=status)
