"""Between the handlers of transformers' server and the engine: each request with its own options."""

from __future__ import annotations

import asyncio
import uuid
from contextvars import ContextVar
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.utils import BaseGenerateManager, CBGenerateManager, GenerationState

from .engine.client import EngineClient, Handler
from .stop_strings import TrimmedQueue, trimmed
from .streams import MergedQueue


asked_for: ContextVar[list[OneRequest] | None] = ContextVar("asked_for", default=None)
"""What the engine is asked for on behalf of the present connection."""


class SpeculativeState(GenerationState):
    """
    What the handlers ask for a way to generate: always the engine.

    Args:
        engine (`EngineClient`): runs the requests.
    """

    def __init__(self, engine: EngineClient):
        super().__init__(continuous_batching=True)
        self._engine = engine

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return Generation(self._engine)

    def is_cb_alive(self) -> bool:
        return self._engine.fatal_error is None

    def shutdown(self) -> None:
        """The engine is ended by whoever started it."""


class Generation(BaseGenerateManager):
    """
    One request: transformers' `CBGenerateManager` streams and decodes, in front of an engine that is told this
    request's options.

    Args:
        engine (`EngineClient`): runs the requests.
    """

    def __init__(self, engine: EngineClient):
        self._engine = engine

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str, **others: Any
    ) -> tuple[Any, Any]:
        frontend, request, stop_strings = *self._frontend(gen_config, request_id), gen_config.stop_strings
        texts, streamer = frontend.generate_streaming(
            model, processor, inputs, gen_config, request.request_id, **others
        )
        merged = MergedQueue(texts)
        return (TrimmedQueue(merged, stop_strings), streamer) if stop_strings else (merged, streamer)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        frontend, request = self._frontend(gen_config, request_id)
        try:
            text, length, tokens = await frontend.generate_non_streaming(
                model, processor, inputs, gen_config, request.request_id
            )
        except RuntimeError:
            await request.admitted()  # it may have been refused
            raise
        return trimmed(text, gen_config.stop_strings), length, tokens

    def _frontend(self, gen_config: GenerationConfig, request_id: str) -> tuple[CBGenerateManager, OneRequest]:
        frontend, request = CBGenerateManager(), OneRequest(self._engine, gen_config, request_id)
        frontend._cb = request
        asked = asked_for.get()
        if asked is not None:
            asked.append(request)
        return frontend, request

    def stop(self) -> None:
        """The engine is ended by whoever started it."""


class OneRequest:
    """
    The engine, as `CBGenerateManager` uses it for a single request, whose options it does not pass on itself.

    Args:
        engine (`EngineClient`): runs the requests.
        gen_config (`GenerationConfig`): the request's.
        request_id (`str`): what the client calls it. Others may have chosen the same (`X-Request-ID`).
    """

    def __init__(self, engine: EngineClient, gen_config: GenerationConfig, request_id: str):
        self._engine, self._config = engine, gen_config
        self.request_id = f"{request_id}-{uuid.uuid4().hex}"
        """A name that no other request has."""
        self._admission: asyncio.Future[None] | None = None

    async def admitted(self) -> None:
        """
        Waits until the engine has taken it.

        Raises:
            ValueError, TypeError, queue.Full: if it is refused.
        """
        if self._admission is not None:
            await self._admission

    def cancel(self) -> None:
        """Ends it, if it is not over."""
        self._engine.cancel_request(self.request_id)

    @property
    def background_thread_status(self) -> Any:
        return self._engine.background_thread_status

    def add_request(self, input_ids: list[int], request_id: str, streaming: bool, **_: Any) -> str:
        try:
            self._admission = self._engine.add_request(
                input_ids,
                request_id,
                streaming=streaming,
                generation_config=self._config,
                seed=getattr(self._config, "seed", None),
            )
        except BaseException:
            self._engine.unregister_result_handler(request_id)  # it may be there before the request
            raise
        return request_id

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        self._engine.register_result_handler(request_id, callback)

    def cancel_request(self, request_id: str) -> None:
        self._engine.cancel_request(request_id)
