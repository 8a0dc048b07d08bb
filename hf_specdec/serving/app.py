"""The FastAPI application: transformers' routes and handlers in front of our engine."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import Modality, get_response_template

from ..adapters import Choice
from ..verification.log_probabilities import Mode
from .access import add_access
from .answer_logprobs import answer_logprobs, best_asked
from .answers import ParsedAnswers, is_cut, may_have_parts
from .body_limits import BodyLimit
from .characters import shortened
from .choices import all_of, begin_all, one_answer, one_begun, one_stream
from .decoding import decode_by
from .defaults import MOST_BODY_BYTES, NO_IMAGES, STALL_SECONDS
from .disconnects import CancelOnDisconnect
from .engine.client import EngineClient
from .engine.messages import Served
from .error_answers import add_error_handlers, error_answer
from .errors import UnknownModel, refusing
from .generation import Generation, SpeculativeState, asked_for
from .health import add_health
from .images import ImageReader
from .metrics import registry_of
from .requests import (
    BODIES,
    LENGTHS,
    Facts,
    LoadModelBody,
    checked,
    describe,
    grammar_of,
    normal_items,
    normal_messages,
    options_of,
    prompts_of,
    reserved_names,
    roles_of,
)
from .routes import add_body_routes, body_of, replace_route
from .scored_answers import ScoredChoices, ScoredResponses, scored_answer
from .stream_ends import event, until_done, until_failed
from .streams import QuickChunks
from .text_limits import TextLimit
from .timeouts import Deadline
from .tokenising import Later, PromptMaker, TokenisedElsewhere
from .tokens import TokenRoutes
from .work_pool import WorkPool, at_once


_NOT_THEIRS = ("seed", "logit_bias", "frequency_penalty", "grammar")
"""Fields that transformers' handlers do not get: they would seed torch globally, and penalise otherwise."""


class OneModel(ModelManager):
    """
    A model manager with a single model, which the engine has already loaded.

    Args:
        name (`str`): the model's name for clients.
        model (`Served`): config and generation config of the model, as the engine reports them.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
        images (`ImageReader` or `str`, *optional*): reads images in messages; or the reason why there may be none.
    """

    def __init__(
        self,
        name: str,
        model: Served,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageReader | str = NO_IMAGES,
    ):
        self._loaded, self._began = (model, tokenizer), int(time.time())
        self._images = images if isinstance(images, ImageReader) else None
        self.facts = Facts(
            model.config.get_text_config().vocab_size,
            roles_of(tokenizer),
            reserved_names(tokenizer),
            has_end=model.generation_config.eos_token_id is not None,
            no_images=images if isinstance(images, str) else "",
        )
        """What checks of requests have to know."""
        self.prompts = PromptMaker(tokenizer, TextLimit.of(tokenizer, model.longest_text), self._images)
        """Stands for the tokenizer where handlers make prompts."""
        self.work = WorkPool()
        """Does the work on large requests."""
        self.answer_seconds: float | None = None
        """Most seconds that an answer may take; None: any number."""
        super().__init__(force_model=name)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, PreTrainedTokenizerBase]:
        return self._loaded

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        return Modality.LLM if self._images is None else Modality.VLM

    async def load_model_streaming(self, name: str = "", *_: Any, **__: Any) -> AsyncIterator[str]:
        yield f"data: {json.dumps({'status': 'ready', 'model': name or self.force_model, 'cached': True})}\n\n"

    def list_models(self, *_: Any) -> list[dict[str, Any]]:
        own = {"id": self.force_model, "object": "model", "created": self._began, "owned_by": "hf-specdec"}
        own |= {"root": self.force_model, "parent": None, "max_model_len": self._loaded[0].longest_text}
        return [own, *(own | {"id": name, "parent": self.force_model} for name in self._loaded[0].adapters)]

    get_gen_models = list_models  # its name before transformers 5.24

    def id_of(self, name: str | None) -> str:
        """
        The id of the model, or of the adapter, that goes by a name: its own, or that with the revision that
        transformers' server adds. None: the model.

        Raises:
            UnknownModel: for any other name.
        """
        known = [one["id"] for one in self.list_models()]
        for found in known:
            if name in (None, found, f"{found}@main"):
                return found
        others = f" (with the adapters {', '.join(map(repr, known[1:]))})" if known[1:] else ""
        raise UnknownModel(f"`model={shortened(name)}` is not served here, but {known[0]!r}{others} is.")

    def adapter_of(self, name: str | None) -> Choice:
        """The adapter of a request for a model of this name."""
        adapters, found = self._loaded[0].adapters, self.id_of(name)
        return (found if found in adapters else None) if adapters else ...


class _OwnRequests:
    """
    A mixin for transformers' handlers: requests have options of their own, including those that the handlers ignore,
    and options that would change the answer but cannot are refused. A stream begins with the first token, so that a
    request that is refused, or fails before, gets an HTTP error status. What is found wrong before the engine has the
    request, or by the engine as it takes it, is the request's fault; what fails later is not.
    """

    model_manager: OneModel
    _body: type[Any]
    """The type of the route's body."""
    _ended = staticmethod(until_done)
    """Ends the events of a stream as OpenAI's clients expect it."""
    _has_parts = True
    """Whether answers have parts by the model's response template."""

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str | None, Any, PromptMaker]:
        name = self.model_manager.id_of(body.get("model"))
        return name, self.model_manager.load_model_and_processor()[0], self.model_manager.prompts

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        handler: Any = super()  # of the handler with this mixin
        given = {name: value for name, value in body.items() if value is not None}  # null: default
        number, work = given.get("n", 1), self.model_manager.work

        def prepared() -> list[Later]:
            parts = self._prompts_in(self._checked(given))
            return [
                at_once(handler.handle_request(part, f"{request_id}-{number * place}" if place else request_id))
                for place, part in enumerate(parts)
            ]

        if asked_for.get() is None:
            asked_for.set([])
        prompts = [
            (later, await work.run(later.arguments, reads_images=later.reads_images))
            for later in await work.run(prepared)
        ]
        deadline = Deadline(self.model_manager.answer_seconds)
        begun = begin_all(prompts, number)
        if not isinstance(begun[0], StreamingResponse):
            answers = await deadline.wait(all_of(begun))
            return answers[0] if len(answers) == 1 else await work.run(one_answer, answers, number)
        await deadline.wait(one_begun(list(asked_for.get() or ())))
        include_usage = (given.get("stream_options") or {}).get("include_usage")
        events = self._one_stream([one.body_iterator for one in begun], number, include_usage)
        begun[0].body_iterator = self._ended(deadline.events(events))
        return begun[0]

    def prompt_of(self, body: dict[str, Any]) -> Later:
        """The prompt of a body."""
        handler: Any = super()  # of the handler with this mixin
        return at_once(handler.handle_request(self._checked(body), ""))

    def _prompts_in(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Bodies with a prompt each."""
        return [body]

    def _one_stream(self, streams: list[Any], number: int, include_usage: bool | None) -> Any:
        """The events of all streams."""
        return (
            streams[0] if len(streams) == 1 and include_usage is None else one_stream(streams, number, include_usage)
        )

    def _validate_request(self, body: dict[str, Any]) -> None:
        """Does nothing: the body has been checked by its type."""

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        """
        The body as transformers' handler takes it.

        Raises:
            RequestRefused: if it asks for what cannot be served; the message names the field.
        """
        found = checked(self._body, body, self.model_manager.facts)
        if body.get("tool_choice") == "none":
            body = {name: value for name, value in body.items() if name != "tools"}
        options = found.generation_config
        if options is not None:
            body = body | {"generation_config": json.dumps(options_of(options))}
            if options.seed is not None:
                body["seed"] = options.seed
        if body.get("logit_bias") is not None:
            body = body | {"logit_bias": found.logit_bias}
        if (grammar := grammar_of(found)) is not None:
            body = body | {"grammar": grammar}
        return body | {"best_tokens": found.best_tokens}

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        others = {name: value for name, value in body.items() if name not in _NOT_THEIRS}
        if body.get("max_completion_tokens") is not None:  # which transformers 5.17 leaves out
            others["max_tokens"] = body["max_completion_tokens"]
        if others.get("stop") in ("", []):
            del others["stop"]
        handler: Any = super()  # of the handler with this mixin
        with refusing(ValueError, TypeError):  # of a `GenerationConfig`, which checks its options
            config = handler._build_generation_config(others, model_generation_config, use_cb=use_cb)
        config.use_cache = True
        if all(body.get(name) is None for name in (*LENGTHS, "generation_config")):
            config.max_new_tokens = config.max_length = None  # what fits
        decode_by(config, body, model_generation_config, self.model_manager.adapter_of(body.get("model")))
        config.top_logprobs = body.get("best_tokens")
        config.grammar = body.get("grammar")
        if body.get("logit_bias"):
            config.sequence_bias = body["logit_bias"]
        if config.stop_strings is None:
            config.stop_strings = model_generation_config.stop_strings
        elif config.stop_strings == "":
            config.stop_strings = []
        return config

    async def _non_streaming(self, request_id: str, model: Any, tokenizer: Any, *args: Any, **options: Any) -> Any:
        handler: Any = super()  # of the handler with this mixin
        config, given = _config_in(args), [*args, *options.values()]
        generation = next(one for one in given if isinstance(one, Generation))
        inputs = next(one for one in given if isinstance(one, Mapping) and "input_ids" in one)
        number = await generation.generate(inputs, config, request_id)

        def answer() -> Any:
            """Decodes and parses the text, and writes its JSON."""
            found = at_once(
                handler._non_streaming(request_id, model, ParsedAnswers(tokenizer, config), *args, **options)
            )
            if best_asked(config) is None or generation.result is None:
                return found
            has_parts = self._has_parts and get_response_template(tokenizer, model) is not None
            has_parts = has_parts and may_have_parts(config)
            logprobs = answer_logprobs(tokenizer, config, has_parts)
            logprobs.add_all(generation.result)
            logprobs.end(is_cut(config))
            return scored_answer(self, found, logprobs.take())

        return await self.model_manager.work.run(answer, num_tokens=number)


def _config_in(arguments: tuple[Any, ...]) -> GenerationConfig:
    """The generation config among a handler's arguments, in which its place differs from handler to handler."""
    return next(one for one in arguments if isinstance(one, GenerationConfig))


class _Chat(TokenisedElsewhere, _OwnRequests, ScoredChoices, QuickChunks, ChatCompletionHandler):
    _body = BODIES["/v1/chat/completions"]

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        body = super()._checked(body)
        return body | {"messages": normal_messages(body["messages"])}


class _Completion(TokenisedElsewhere, _OwnRequests, ScoredChoices, QuickChunks, CompletionHandler):
    _body = BODIES["/v1/completions"]
    _is_chat = _has_parts = False

    def _prompts_in(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [body | {"prompt": prompt} for prompt in prompts_of(body["prompt"])]


class _Incomplete(ScoredResponses):
    """Answers responses as incomplete if they are as long as they may be (transformers' handler completes all)."""

    model_manager: OneModel

    async def _non_streaming(self, *args: Any, **options: Any) -> JSONResponse:
        response = await super()._non_streaming(*args, **options)
        return JSONResponse(_incomplete(json.loads(response.body))) if is_cut(_config_in(args)) else response

    def _streaming(self, *args: Any, **options: Any) -> StreamingResponse:
        response = super()._streaming(*args, **options)
        response.body_iterator = _told_if_incomplete(response.body_iterator, _config_in(args), self.model_manager.work)
        return response


class _Response(TokenisedElsewhere, _OwnRequests, _Incomplete):
    """Handles responses, which are streamed only if that is asked for (transformers' handler does so by default)."""

    _body = BODIES["/v1/responses"]
    _ended = staticmethod(until_failed)

    def _one_stream(self, streams: list[Any], number: int, include_usage: bool | None) -> Any:
        return streams[0]  # its last event has the usage

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        body = super()._checked(body)
        return body | {"input": normal_items(body["input"]), "stream": body.get("stream") or False}


async def _told_if_incomplete(events: Any, config: GenerationConfig, work: WorkPool) -> AsyncGenerator[str, None]:
    """The events of a streamed response, whose last one says so if the text is as long as it may be."""
    async with aclosing(events):
        async for text in events:
            if is_cut(config) and '"type":"response.completed"' in text:
                text = await work.run(_as_incomplete, text, num_tokens=len(text) // 4)
            yield text


def _as_incomplete(completed: str) -> str:
    """The event at the end of a response as that of one whose text is as long as it may be."""
    last = json.loads(completed.removeprefix("data: "))
    return event(last | {"type": "response.incomplete", "response": _incomplete(last["response"])})


def _incomplete(response: dict[str, Any]) -> dict[str, Any]:
    """A completed response as one whose text is as long as it may be."""
    return response | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


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
        "chat_handler": _Chat(models, state),
        "completion_handler": _Completion(models, state),
        "response_handler": _Response(models, state),
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
    add_error_handlers(app, engine)
    app.add_middleware(CancelOnDisconnect)
    app.add_middleware(BodyLimit, most_bytes=max_body_bytes)
    add_access(app, api_keys or [], origins or [])
    return app


def _add_routes(app: FastAPI, models: OneModel) -> None:
    """Routes about the one model, and about the server."""

    @app.get("/version")
    def about() -> JSONResponse:
        return JSONResponse({"version": version("hf-specdec")})

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
