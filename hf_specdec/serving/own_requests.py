"""What our requests have beside those of transformers' handlers, whatever they ask for: a mixin for these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import GenerationConfig
from transformers.cli.serving.utils import get_response_template

from .answer_logprobs import answer_logprobs, best_asked
from .answer_streams import ParsedAnswers
from .answers import is_cut, may_have_parts
from .characters import shortened
from .choices import all_of, begin_all, one_answer, one_begun, one_stream
from .decoding import beside, decode_by
from .errors import RequestRefused, refusing
from .generation import Generation, asked_for
from .null_fields import add_null_fields
from .one_model import OneModel
from .requests import (
    LENGTHS,
    TAKEN_ALONE,
    checked,
    demanded_tools,
    grammar_of,
    options_of,
    told_of,
    told_place,
    variables_of,
)
from .stream_ends import event, until_done
from .timeouts import Deadline
from .tokenising import Later, PromptMaker
from .usage import add_details, num_reasoning, with_details
from .work_pool import at_once


_NOT_THEIRS = ("seed", "logit_bias", "frequency_penalty", "grammar", "demanded")
"""Fields that transformers' handlers do not get: they would seed torch globally, and penalise otherwise."""


class OwnRequests:
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
    _with_logprobs: Any
    """Adds log-probabilities to an answer."""

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
        body = {
            name: value for name, value in body.items() if name not in LENGTHS or getattr(found, name, 0) is not None
        }
        if body.get("tool_choice") == "none":
            body = {name: value for name, value in body.items() if name != "tools"}
        options = found.generation_config
        if options is not None:
            body = body | {"generation_config": json.dumps(options_of(options))}
            if options.seed is not None:
                body["seed"] = options.seed
        body = {name: value for name, value in body.items() if name not in TAKEN_ALONE}
        if (effort := getattr(found, "effort", None)) is not None:
            variables = variables_of(effort, self.model_manager.facts) | (body.get("chat_template_kwargs") or {})
            body["chat_template_kwargs"] = variables
        if body.get("logit_bias") is not None:
            body = body | {"logit_bias": found.logit_bias}
        if (grammar := grammar_of(found)) is not None:
            body = body | {"grammar": grammar}
        if tools := demanded_tools(body):
            body = body | self._demand(body, tools)
        return body | {"best_tokens": found.best_tokens}

    def _demand(self, body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """What asks for a call of one of these tools."""
        choice, models = body["tool_choice"], self.model_manager
        if "grammar" in body:
            raise RequestRefused(f"`tool_choice={shortened(choice)}` and a form of the answer exclude each other.")
        if models.calls is None:
            raise RequestRefused(
                f"`tool_choice={shortened(choice)}` is not supported with this model: its chat template does not show "
                "how it calls functions. Give 'auto' or 'none'."
            )
        for number, tool in enumerate(body["tools"]):
            if tool in tools and (reason := models.calls.check(tool)) is not None:
                where = "function.parameters" if "function" in tool else "parameters"
                where += told_place((tool.get("function") or tool).get("parameters"), reason)
                raise RequestRefused(f"`tools[{number}].{where}` {told_of(reason)}.")
        is_named, in_pieces = isinstance(choice, dict), bool(body.get("stream"))
        is_one = body.get("parallel_tool_calls") is False or is_named
        grammar = models.calls.grammar(tools, is_one, may_begin_lines=models.reasoning is not None)
        demanded = models.calls.demanded(tools, is_named, in_pieces)
        return {"grammar": grammar, "demanded": demanded}

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        others = {name: value for name, value in body.items() if name not in _NOT_THEIRS}
        for name in LENGTHS[:3]:  # the first of which transformers 5.17 leaves out
            if body.get(name) is not None:
                others["max_tokens"] = body[name]
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
        config.beside = replace(
            beside(config),
            demanded=body.get("demanded"),
            may_reason=self._has_parts,
            tools=body.get("tools") or (),
            is_one_call=body.get("parallel_tool_calls") is False,
        )
        if body.get("logit_bias"):
            config.sequence_bias = body["logit_bias"]
        if config.stop_strings is None:
            config.stop_strings = model_generation_config.stop_strings
        elif config.stop_strings == "":
            config.stop_strings = []
        return config

    async def _non_streaming(self, request_id: str, model: Any, tokenizer: Any, *args: Any, **options: Any) -> Any:
        handler: Any = super()  # of the handler with this mixin
        config, given = config_in(args), [*args, *options.values()]
        own = beside(config)
        generation = next(one for one in given if isinstance(one, Generation))
        inputs = next(one for one in given if isinstance(one, Mapping) and "input_ids" in one)
        number = await generation.generate(inputs, config, request_id)

        def answer() -> JSONResponse:
            """Decodes and parses the text, and writes its JSON."""
            parsed = ParsedAnswers(tokenizer, config)
            found = json.loads(
                bytes(at_once(handler._non_streaming(request_id, model, parsed, *args, **options)).body)
            )
            add_details(found, *self._details(generation, inputs["input_ids"], tokenizer))
            if own.demanded is not None and (is_cut(config) or own.demanded.is_named):
                self._mark_demanded(found, is_cut(config))
            if best_asked(config) is not None and generation.result is not None:
                has_parts = self._has_parts and get_response_template(tokenizer, model) is not None
                logprobs = answer_logprobs(tokenizer, config, has_parts and may_have_parts(config))
                logprobs.add_all(generation.result)
                logprobs.end(is_cut(config))
                found = self._with_logprobs(found, logprobs.take())
            add_null_fields(found)
            return JSONResponse(found)

        return await self.model_manager.work.run(answer, num_tokens=number)

    def _streaming(self, request_id: str, model: Any, tokenizer: Any, *args: Any, **options: Any) -> StreamingResponse:
        handler: Any = super()  # of the handler with this mixin
        response: StreamingResponse = handler._streaming(request_id, model, tokenizer, *args, **options)
        given = [*args, *options.values()]
        generation = next(one for one in given if isinstance(one, Generation))
        inputs = next(one for one in given if isinstance(one, Mapping) and "input_ids" in one)
        details = partial(self._details, generation, inputs["input_ids"], tokenizer)
        response.body_iterator = with_details(response.body_iterator, details)
        return response

    def chunk_to_sse(self, chunk: Any) -> str:
        """A chunk of a stream as an event."""
        handler: Any = super()  # of the handler with this mixin
        if not getattr(chunk, "choices", None):
            return handler.chunk_to_sse(chunk)
        found = chunk.model_dump(mode="json", exclude_none=True)
        add_null_fields(found)
        return event(found)

    def _details(self, generation: Generation, prompt: list[int], tokenizer: Any) -> tuple[int, int]:
        """How many tokens of a prompt were cached, and how many of the answer are reasoning."""
        if generation.result is None:
            return 0, 0
        reasoning = self.model_manager.reasoning if self._has_parts else None
        tokens = generation.result.generated_tokens
        return generation.result.num_cached_tokens, num_reasoning(reasoning, prompt, tokens, tokenizer)

    def _mark_demanded(self, answer: dict[str, Any], is_cut: bool) -> None:
        """Says of an answer that its last call is cut, or that the request has named its function."""


def config_in(arguments: tuple[Any, ...]) -> GenerationConfig:
    """The generation config among a handler's arguments, in which its place differs from handler to handler."""
    return next(one for one in arguments if isinstance(one, GenerationConfig))
