"""The FastAPI application: transformers' routes and handlers in front of our engine."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server

from .answers import ParsedAnswers, is_cut
from .bodies import (
    LENGTHS,
    check_input,
    check_numbers,
    check_options,
    check_prompt,
    checked_messages,
    chosen_tools,
    sequence_bias,
)
from .body_limits import MOST_BODY_BYTES, BodyLimit
from .characters import check_characters
from .disconnects import CancelOnDisconnect
from .engine.client import EngineClient
from .engine.messages import Served
from .error_answers import add_error_handlers, error_answer
from .errors import RequestFailed, RequestRefused, unexpected
from .generation import SpeculativeState, asked_for
from .health import STALL_SECONDS, add_health
from .json_bodies import read_json_with
from .metrics import registry_of
from .stop_strings import check_number_and_length, checked_stop_strings
from .stream_ends import event, until_done, until_failed
from .streams import QuickChunks
from .text_limits import TextLimit
from .tokenising import PromptMaker, TokenisedElsewhere, begun
from .work_pool import WorkPool


class OneModel(ModelManager):
    """
    A model manager with a single model, which the engine has already loaded.

    Args:
        name (`str`): the model's name for clients.
        model (`Served`): config and generation config of the model, as the engine reports them.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
    """

    def __init__(self, name: str, model: Served, tokenizer: PreTrainedTokenizerBase):
        most_tokens = min(model.most_tokens, model.context or model.most_tokens)
        self._loaded = model, tokenizer
        self.prompts = PromptMaker(tokenizer, TextLimit.of(tokenizer, most_tokens))
        """Stands for the tokenizer where handlers make prompts."""
        self.work = WorkPool()
        """Does the work on large requests."""
        super().__init__(force_model=name)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, PreTrainedTokenizerBase]:
        return self._loaded

    async def load_model_streaming(self, *_: Any, **__: Any) -> AsyncIterator[str]:
        yield f"data: {json.dumps({'status': 'ready', 'model': self.force_model, 'cached': True})}\n\n"

    def list_models(self, *_: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "hf-specdec"}]

    get_gen_models = list_models  # its name before transformers 5.24

    def is_called(self, name: Any) -> bool:
        """Whether the model goes by a name: its own, or that with the revision that transformers' server adds."""
        return name in (self.force_model, f"{self.force_model}@main")


class _OwnRequests:
    """
    A mixin for transformers' handlers: requests have options of their own, including those that the handlers ignore,
    and options that would change the answer but cannot are refused. A stream begins with the first token, so that a
    request that is refused, or fails before, gets an HTTP error status. What is found wrong before the engine has the
    request, or by the engine as it takes it, is the request's fault; what fails later is not.
    """

    model_manager: OneModel
    _ended = staticmethod(until_done)
    """Ends the events of a stream as OpenAI's clients expect it."""

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str | None, Any, PromptMaker]:
        name = self.model_manager.force_model
        if body.get("model") is not None and not self.model_manager.is_called(body["model"]):
            raise ValueError(f"`model={body['model']!r}` is not served here, but {name!r} is.")
        return name, self.model_manager.load_model_and_processor()[0], self.model_manager.prompts

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        handler: Any = super()  # of the handler with this mixin
        try:
            given = {name: value for name, value in body.items() if value is not None}  # null: default
            body = await self.model_manager.work.run(self._checked, given)
            response = await begun(await handler.handle_request(body, request_id), self.model_manager.work)
            for request in asked_for.get() or ():
                await request.begun()
        except (ValueError, TypeError, TemplateError) as error:  # the last: a chat template's own check
            raise RequestRefused(str(error)) from error
        if isinstance(response, StreamingResponse):
            response.body_iterator = self._ended(response.body_iterator)
        return response

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body as transformers' handler gets it. Errors of value or type are the request's fault."""
        check_characters(body)
        check_options(body)
        check_numbers(body)
        return chosen_tools(body)

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        # A handler would seed torch globally.
        others = {name: value for name, value in body.items() if name not in ("seed", "logit_bias")}
        if body.get("max_completion_tokens") is not None:  # which transformers 5.17 leaves out
            others["max_tokens"] = body["max_completion_tokens"]
        if others.get("stop") in ("", []):
            del others["stop"]
        handler: Any = super()  # of the handler with this mixin
        config = handler._build_generation_config(others, model_generation_config, use_cb=use_cb)
        config.use_cache = True
        if all(body.get(name) is None for name in (*LENGTHS, "generation_config")):
            config.max_new_tokens = config.max_length = None  # what fits
        config.seed = body.get("seed")
        model, _ = self.model_manager.load_model_and_processor()
        bias = sequence_bias(body.get("logit_bias"), model.config.get_text_config().vocab_size)
        if bias is not None:
            config.sequence_bias = bias
        if config.stop_strings is None:
            config.stop_strings = model_generation_config.stop_strings
        elif config.stop_strings != model_generation_config.stop_strings:
            config.stop_strings = checked_stop_strings(config.stop_strings)
            check_number_and_length(config.stop_strings)
        if body.get("temperature") or body.get("top_p") is not None:
            config.do_sample = body.get("temperature") != 0
        return config

    async def _non_streaming(self, request_id: str, model: Any, tokenizer: Any, *args: Any, **options: Any) -> Any:
        answers = ParsedAnswers(tokenizer, _config_in(args))
        handler: Any = super()  # of the handler with this mixin
        try:
            return await handler._non_streaming(request_id, model, answers, *args, **options)
        except RequestRefused:
            raise
        except (ValueError, TypeError) as error:  # of the answer, which the request is not at fault for
            raise RequestFailed(unexpected(error), is_its_own=False) from error


def _config_in(arguments: tuple[Any, ...]) -> GenerationConfig:
    """The generation config among a handler's arguments, in which its place differs from handler to handler."""
    return next(one for one in arguments if isinstance(one, GenerationConfig))


class _Chat(TokenisedElsewhere, _OwnRequests, QuickChunks, ChatCompletionHandler):
    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        return super()._checked(body | {"messages": checked_messages(body.get("messages"))})


class _Completion(TokenisedElsewhere, _OwnRequests, QuickChunks, CompletionHandler):
    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        check_prompt(body)
        return super()._checked(body)


class _Incomplete(ResponseHandler):
    """Answers responses as incomplete if they are as long as they may be (transformers' handler completes all)."""

    async def _non_streaming(self, *args: Any, **options: Any) -> JSONResponse:
        response = await super()._non_streaming(*args, **options)
        return JSONResponse(_incomplete(json.loads(response.body))) if is_cut(_config_in(args)) else response

    def _streaming(self, *args: Any, **options: Any) -> StreamingResponse:
        response = super()._streaming(*args, **options)
        response.body_iterator = _told_if_incomplete(response.body_iterator, _config_in(args))
        return response


class _Response(TokenisedElsewhere, _OwnRequests, _Incomplete):
    """Handles responses, which are streamed only if that is asked for (transformers' handler does so by default)."""

    _ended = staticmethod(until_failed)

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        check_input(body)
        return super()._checked(body | {"stream": body.get("stream") or False})


async def _told_if_incomplete(events: Any, config: GenerationConfig) -> AsyncGenerator[str, None]:
    """The events of a streamed response, whose last one says so if the text is as long as it may be."""
    async with aclosing(events):
        async for text in events:
            if is_cut(config) and '"type":"response.completed"' in text:
                last = json.loads(text.removeprefix("data: "))
                text = event(last | {"type": "response.incomplete", "response": _incomplete(last["response"])})
            yield text


def _incomplete(response: dict[str, Any]) -> dict[str, Any]:
    """A completed response as one whose text is as long as it may be."""
    return response | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


class _Nothing:
    """A stand-in for handlers that need the model itself: every request to it is an error."""

    async def handle_request(self, *_: Any) -> Response:
        raise RequestRefused("This server is for chat, completions and responses. Others need `transformers serve`.")


def build_app(
    engine: EngineClient,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
    *,
    stall_seconds: float = STALL_SECONDS,
    max_body_bytes: int = MOST_BODY_BYTES,
) -> FastAPI:
    """
    transformers' server for one model, with `/metrics` beside its routes.

    Args:
        engine (`EngineClient`): runs the requests; the caller ends it.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
        model_name (`str`): the model's name for clients.
        stall_seconds (`float`, *optional*, defaults to 60): see `add_health`.
        max_body_bytes (`int`, *optional*, defaults to 4 MiB): most bytes of a request's body; see `BodyLimit`.
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
    _add_routes(app, models)
    _add_metrics(app, engine, model_name)
    add_health(app, engine, stall_seconds)
    add_error_handlers(app, engine)
    read_json_with(app, models.work)
    app.add_middleware(CancelOnDisconnect)
    app.add_middleware(BodyLimit, most_bytes=max_body_bytes)
    return app


def _add_routes(app: FastAPI, models: OneModel) -> None:
    """Routes about the one model."""

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> JSONResponse:
        if models.is_called(name):
            return JSONResponse(models.list_models()[0])
        return error_answer(
            404, "invalid_request_error", f"`{name}` is not served here, but `{models.force_model}` is."
        )

    @app.post("/load_model")
    async def load_model(body: dict[str, Any]) -> Response:
        if models.is_called(body.get("model")):
            return StreamingResponse(models.load_model_streaming(), media_type="text/event-stream")
        raise RequestRefused(f"`model={body.get('model')!r}` is not served here, but {models.force_model!r} is.")

    app.router.routes.insert(0, app.router.routes.pop())  # before transformers' own, which loads others


def _add_metrics(app: FastAPI, engine: EngineClient, model_name: str) -> None:
    registry = registry_of(engine, model_name)

    @app.get("/metrics")
    def metrics() -> Response:
        if engine.fatal_error is not None:
            return error_answer(503, "engine_error", str(engine.fatal_error))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
