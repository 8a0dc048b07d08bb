"""An engine with the server's application, held by one actor of Ray Serve."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import generate_latest

from .. import loading
from ..bulk import Answering, answering
from ..serving.engine import EngineOptions
from ..serving.in_process import Message, messages_of
from ..serving.metrics import registry_of
from .board import SECONDS_BETWEEN_NOTES
from .front import Asked


@dataclass(frozen=True)
class ReplicaOptions:
    """
    Options of every replica.

    Args:
        engine (`EngineOptions`): of its engine; `device` is that of the actor, which sees no GPUs of others.
        model_name (`str`, *optional*): what clients call the model; by default as it is named in `engine`.
        stall_seconds (`float`): seconds without the end of a forward after which Ray Serve replaces the replica.
        app (`dict[str, Any]`): further options of `build_app`, such as `api_keys`.
    """

    engine: EngineOptions
    model_name: str | None = None
    stall_seconds: float = 60.0
    app: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.model_name or self.engine.target or loading.SMOLLM2


class Replica:
    """
    Answers requests. Its start ends when the engine has warmed up, and its process ends with the engine.

    Args:
        options (`ReplicaOptions`): see there.
        board (`DeploymentHandle`): takes the metrics.
    """

    def __init__(self, options: ReplicaOptions, board: Any):
        from ray import serve

        self._options, self._board = options, board
        self._own_name = serve.get_replica_context().replica_id.unique_id
        self._ends, self._has_begun = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._answers: Answering
        self._holder = threading.Thread(target=self._hold, daemon=True)
        self._holder.start()
        self._has_begun.wait()
        if self._error is not None:
            raise self._error

    async def answer(self, keys: list[str], asked: Asked) -> AsyncGenerator[Message, None]:
        """
        The messages of the answer to a request.

        Args:
            keys (`list[str]`): of the request's text, by which it has come here.
            asked (`Asked`): the request.
        """
        about: dict[str, Any] = {"method": asked.method, "query": asked.query, "headers": asked.headers}
        async with aclosing(messages_of(self._answers.app, asked.path, asked.content, **about)) as messages:
            async for message in messages:
                self._die_with_the_engine()  # so that the request is repeated elsewhere
                yield dict(message)

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces the replica if it raises."""
        seconds = self._answers.engine.seconds_stalled
        if seconds > self._options.stall_seconds:
            raise RuntimeError(f"Requests wait, and for {seconds:.0f} seconds no forward has ended.")

    def __del__(self) -> None:
        """Called by Ray Serve when the last request has been answered."""
        self._ends.set()
        self._holder.join()

    def _hold(self) -> None:
        """The thread that begins the engine, which would end with any other, and says what it does."""
        try:
            with answering(self._options.engine, model_name=self._options.name, **self._options.app) as self._answers:
                engine = self._answers.engine
                registry = registry_of(engine, self._options.name)
                while not engine.is_warm and engine.fatal_error is None:
                    self._ends.wait(0.05)
                self._has_begun.set()
                while not self._ends.wait(SECONDS_BETWEEN_NOTES):
                    self._die_with_the_engine()
                    self._board.note.remote(self._own_name, generate_latest(registry).decode())
        except BaseException as error:
            self._error = error
            self._has_begun.set()

    def _die_with_the_engine(self) -> None:
        if self._answers.engine.fatal_error is not None and not self._ends.is_set():
            os._exit(1)
