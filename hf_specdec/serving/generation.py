"""Between the handlers of transformers' server and the manager: each request with its own options."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.utils import BaseGenerateManager, CBGenerateManager, GenerationState

from ..batching import SpeculativeBatchingManager, SpeculativeGenerationOutput
from .stop_strings import TrimmedQueue, trimmed
from .streams import MergedQueue


class SpeculativeState(GenerationState):
    """
    What the handlers ask for a way to generate: always the manager.

    Args:
        manager (`SpeculativeBatchingManager`): runs the requests.
    """

    def __init__(self, manager: SpeculativeBatchingManager):
        super().__init__(continuous_batching=True)
        self._manager = manager

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return Generation(self._manager)

    def is_cb_alive(self) -> bool:
        return self._manager.background_thread_status.fatal_error is None

    def shutdown(self) -> None:
        self._manager.stop(hard_stop=True)


class Generation(BaseGenerateManager):
    """
    One request: transformers' `CBGenerateManager` streams and decodes, in front of a manager that is told this
    request's options.

    Args:
        manager (`SpeculativeBatchingManager`): runs the requests.
    """

    def __init__(self, manager: SpeculativeBatchingManager):
        self._manager = manager

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str, **others: Any
    ) -> tuple[Any, Any]:
        frontend, stop_strings = self._frontend(gen_config, processor), gen_config.stop_strings
        name = _own_name(request_id)
        texts, streamer = frontend.generate_streaming(model, processor, inputs, gen_config, name, **others)
        merged = MergedQueue(texts)
        return (TrimmedQueue(merged, stop_strings), streamer) if stop_strings else (merged, streamer)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        frontend, name = self._frontend(gen_config, processor), _own_name(request_id)
        try:
            text, length, tokens = await frontend.generate_non_streaming(model, processor, inputs, gen_config, name)
        except asyncio.CancelledError:
            self._manager.cancel_request(name)  # nobody waits for it any more
            raise
        return trimmed(text, gen_config.stop_strings), length, tokens

    def _frontend(self, gen_config: GenerationConfig, processor: Any) -> CBGenerateManager:
        frontend = CBGenerateManager()
        frontend._cb = _OneRequest(self._manager, gen_config, getattr(processor, "tokenizer", processor))
        return frontend

    def stop(self) -> None:
        """The manager is stopped by whoever made it."""


class _OneRequest:
    """The manager, as `CBGenerateManager` uses it for a single request, whose options it does not pass on itself."""

    def __init__(self, manager: SpeculativeBatchingManager, gen_config: GenerationConfig, tokenizer: Any):
        self._manager, self._config, self._tokenizer = manager, gen_config, tokenizer

    @property
    def background_thread_status(self) -> Any:
        return self._manager.background_thread_status

    def add_request(self, input_ids: list[int], request_id: str, streaming: bool, **_: Any) -> str:
        try:
            return self._manager.add_request(
                input_ids,
                request_id,
                streaming=streaming,
                generation_config=self._config,
                seed=getattr(self._config, "seed", None),
                tokenizer=self._tokenizer if self._config.stop_strings else None,
            )
        except BaseException:
            self._manager.unregister_result_handler(request_id)  # it may be there before the request
            raise

    def register_result_handler(
        self, request_id: str, callback: Callable[[SpeculativeGenerationOutput], None]
    ) -> None:
        self._manager.register_result_handler(request_id, callback)

    def cancel_request(self, request_id: str) -> None:
        self._manager.cancel_request(request_id)


def _own_name(request_id: str) -> str:
    """A name that no other request has: clients choose their `X-Request-ID`, and may choose alike."""
    return f"{request_id}-{uuid.uuid4().hex}"
