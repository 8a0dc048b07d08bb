"""The link between the handlers of transformers' server and the engine, which gets each request's own options."""

from __future__ import annotations

import asyncio
import copy
import uuid
from contextvars import ContextVar
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBWorkerDeadError,
    GenerationState,
)

from ..batching import SpeculativeGenerationOutput
from ..verification.log_probabilities import LogprobOptions, Mode
from .answer_logprobs import answer_logprobs, best_asked
from .answer_streams import AnswerStream
from .answers import left_out, may_have_parts, pieces_of
from .characters import cut
from .contexts import check_length
from .decoding import beside
from .engine.client import EngineClient
from .engine.open_requests import Handler
from .errors import MOST_OF_A_REASON, RequestFailed, RequestRefused, refusing
from .scored_answers import ScoredQueue
from .stop_strings import TrimmedQueue, trimmed
from .streams import MergedQueue, RaisingQueue
from .tokenizers import LikeTokenizer
from .work_pool import WorkPool


asked_for: ContextVar[list[OneRequest] | None] = ContextVar("asked_for", default=None)
"""Requests to the engine on behalf of the current HTTP connection; None if it is not watched."""


DEFAULT_LENGTH = 1024
"""Most new tokens of a request that does not say how many, if they fit."""


class SpeculativeState(GenerationState):
    """
    A generation state from which the handlers always get the engine.

    Args:
        engine (`EngineClient`): runs the requests.
        work (`WorkPool`, *optional*): does the work on long answers.
        logprobs_mode (`str`, *optional*, defaults to `"raw"`): see `LogprobOptions`.
    """

    def __init__(self, engine: EngineClient, work: WorkPool | None = None, logprobs_mode: Mode = "raw"):
        super().__init__(continuous_batching=True)
        self._engine, self._work, self._logprobs_mode = engine, work or WorkPool(), logprobs_mode

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return Generation(self._engine, self._work, self._logprobs_mode)

    def is_cb_alive(self) -> bool:
        return self._engine.fatal_error is None

    def shutdown(self) -> None:
        """Does nothing: the engine is ended by its caller."""


class Generation(BaseGenerateManager):
    """
    Generation for one request: gives the engine the request's options, and the handlers its text.

    Args:
        engine (`EngineClient`): runs the requests.
        work (`WorkPool`, *optional*): does the work on long answers.
        logprobs_mode (`str`, *optional*, defaults to `"raw"`): see `LogprobOptions`.
    """

    def __init__(self, engine: EngineClient, work: WorkPool | None = None, logprobs_mode: Mode = "raw"):
        self._engine, self._work, self._logprobs_mode = engine, work or WorkPool(), logprobs_mode
        self._tokens: list[int] | None = None
        self.result: SpeculativeGenerationOutput | None = None
        """The last result so far."""
        self.scored: ScoredQueue | None = None
        """What `generate_streaming` returns, if log-probabilities are asked for."""

    def another(self) -> Generation:
        """Generation for another text of the same connection."""
        return Generation(self._engine, self._work, self._logprobs_mode)

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[RaisingQueue, AnswerStream]:
        request = self._request(inputs, gen_config, request_id)
        response_parser = response_parser if may_have_parts(gen_config) else None
        own = processor._own if isinstance(processor, LikeTokenizer) else processor
        logprobs = None
        if best_asked(gen_config) is not None:
            logprobs = answer_logprobs(own, gen_config, has_parts=response_parser is not None)
        pieces = pieces_of(own, gen_config, response_parser)
        stream = AnswerStream(pieces, request.cancel, self._work, logprobs)
        request.add_request(inputs["input_ids"], request.request_id, streaming=True)

        def take(output: SpeculativeGenerationOutput) -> None:
            self.result = output
            stream.take(output)

        request.register_result_handler(request.request_id, take)
        merged, ends = MergedQueue(stream.parts), gen_config.stop_strings
        parts: Any = TrimmedQueue(merged, ends) if ends else merged
        if logprobs is not None:
            parts = self.scored = ScoredQueue(parts, logprobs)
        return RaisingQueue(parts, lambda: request.failure), stream

    async def generate(self, inputs: Any, gen_config: GenerationConfig, request_id: str) -> int:
        """
        Waits for the tokens of the whole text, which `generate_non_streaming` then returns without waiting.

        Returns:
            `int`: the number of tokens of prompt and text.
        """
        request = self._request(inputs, gen_config, request_id)
        ended: asyncio.Future[SpeculativeGenerationOutput] = asyncio.get_running_loop().create_future()

        def note(result: SpeculativeGenerationOutput) -> None:
            if not ended.done():
                ended.set_result(result)

        request.register_result_handler(request.request_id, note)
        request.add_request(inputs["input_ids"], request.request_id, streaming=False)
        await request.begun()  # raises if the request is refused, or has failed
        self.result = await ended
        self._tokens = list(self.result.generated_tokens)
        return len(inputs["input_ids"]) + len(self._tokens)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        if self._tokens is None:
            await self.generate(inputs, gen_config, request_id)
        tokens = self._tokens or []
        ends = left_out(processor, gen_config)
        text = processor.decode([token for token in tokens if token not in ends], skip_special_tokens=True)
        return trimmed(text, gen_config.stop_strings), len(inputs["input_ids"]), tokens

    def _request(self, inputs: Any, gen_config: GenerationConfig, request_id: str) -> OneRequest:
        model, length = self._engine.model, len(inputs["input_ids"])
        if self._engine.fatal_error is not None:
            raise CBWorkerDeadError(str(self._engine.fatal_error))
        if not length:
            raise RequestRefused("The prompt has no tokens. Give text in `prompt`, `messages` or `input`.")
        if gen_config.max_new_tokens is None and gen_config.max_length is None:
            wanted = max(model.generation_config.max_new_tokens or 0, DEFAULT_LENGTH)
            gen_config.max_new_tokens = max(min(wanted, model.longest_text - length), 1)
        check_length(length, gen_config, model.context, model.most_tokens)
        best, inputs_beside = best_asked(gen_config), inputs.get("model_inputs")
        logprobs = None if best is None else LogprobOptions(best, self._logprobs_mode)
        request = OneRequest(self._engine, gen_config, request_id, inputs_beside, logprobs)
        asked = asked_for.get()
        if asked is not None:
            asked.append(request)
        return request

    def stop(self) -> None:
        """Does nothing: the engine is ended by its caller."""


class OneRequest:
    """
    The engine for a single request, with its options.

    Args:
        engine (`EngineClient`): runs the requests.
        gen_config (`GenerationConfig`): the request's options.
        request_id (`str`): the client's name for the request (`X-Request-ID`), which other clients may use as well.
        model_inputs (`dict[str, Any]`, *optional*): what the model reads beside the tokens, as arrays.
        logprobs (`LogprobOptions`, *optional*): the log-probabilities that are asked for.
    """

    def __init__(
        self,
        engine: EngineClient,
        gen_config: GenerationConfig,
        request_id: str,
        model_inputs: dict[str, Any] | None = None,
        logprobs: LogprobOptions | None = None,
    ):
        self._engine, self._config, self._model_inputs = engine, gen_config, model_inputs
        self._logprobs = logprobs
        self._beside = beside(gen_config)
        self.request_id = f"{request_id}-{uuid.uuid4().hex}"
        """The request's name in the engine, which is unique."""
        self._admission: asyncio.Future[None] | None = None
        self._first_result: asyncio.Future[None] | None = None
        self._error: str | None = None
        self._fails_by_its_options = False

    async def admitted(self) -> None:
        """
        Waits until the engine has admitted the request.

        Raises:
            RequestRefused, queue.Full: if the engine refuses the request.
        """
        if self._admission is not None:
            with refusing(ValueError, TypeError):
                await self._admission

    async def begun(self) -> None:
        """
        Waits until the request has a token, or is over.

        Raises:
            RequestRefused, queue.Full: if the request is refused.
            CBWorkerDeadError: if the engine has ended.
            RequestFailed: if the request has ended with another error.
        """
        await self.admitted()
        if self._first_result is not None:
            await self._first_result
        if (failure := self.failure) is not None:
            raise failure

    @property
    def failure(self) -> Exception | None:
        """The error that the request has ended with; None if there is none."""
        if self._error is None:
            return None
        if self._engine.fatal_error is not None:
            return CBWorkerDeadError(self._error)
        if self._fails_by_its_options:
            return RequestFailed(cut(self._error, MOST_OF_A_REASON), is_its_own=True)
        return RequestFailed(self._error, is_its_own=False)

    def cancel(self) -> None:
        """Cancels the request in the engine; does nothing if it is over."""
        self._engine.cancel_request(self.request_id)

    def add_request(self, input_ids: list[int], request_id: str, streaming: bool) -> None:
        try:
            config = copy.copy(self._config)
            vars(config).pop("beside", None)
            self._admission = self._engine.add_request(
                input_ids,
                request_id,
                streaming=streaming,
                generation_config=config,
                seed=self._beside.seed,
                model_inputs=self._model_inputs,
                logprobs=self._logprobs,
                priority=self._beside.priority,
                adapter=self._beside.adapter,
                presence_penalty=self._beside.presence_penalty,
                grammar_after=self._beside.grammar_after,
                frequency_penalty=self._beside.frequency_penalty,
            )
        except BaseException:
            self._engine.unregister_result_handler(request_id)  # registered before the request
            self._first_result = None  # none will come
            raise

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        self._first_result = first_result = asyncio.get_running_loop().create_future()

        def note(result: SpeculativeGenerationOutput) -> None:
            if result.error is not None:
                self._error = result.error
                self._fails_by_its_options = result.fails_by_its_options
            if result.finish_reason is not None:
                # Transformers' handlers say "length" for texts of at least this many tokens, and "stop" for others;
                # see also `is_cut` of `answers`.
                self._config.max_new_tokens = 0 if result.finish_reason == "length" else None
            if not first_result.done():
                first_result.set_result(None)
            callback(result)

        self._engine.register_result_handler(request_id, note)
