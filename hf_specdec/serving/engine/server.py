"""The manager's side of the pipe: takes requests from it and sends their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from ...batching import SpeculativeBatchingManager, SpeculativeGenerationOutput
from ...verification.choosing import NOTHING_TO_CHOOSE
from ...verification.penalties import OccurrencePenalty
from ..contexts import context_of
from ..stop_strings import StopStringCriterion
from .messages import AddReply, AddRequest, AskState, CancelRequest, Ended, Progress, Pulse, Served, State, Warm


SECONDS_BETWEEN_LOOKS = 0.5
"""Seconds between checks of the manager while no message comes, and between pulses while there are requests."""


class EngineServer:
    """
    Serves one `EngineClient`.

    Args:
        manager (`SpeculativeBatchingManager`): runs the requests; the caller starts and stops it.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer, for stop strings.
        connection (`Connection`): one end of a pipe, whose other end the client has.
        when_warm (`Callable`, *optional*): called in a thread when the manager has warmed up.
    """

    def __init__(
        self,
        manager: SpeculativeBatchingManager,
        tokenizer: PreTrainedTokenizerBase,
        connection: Connection,
        when_warm: Callable[[], None] | None = None,
    ):
        self._manager, self._tokenizer, self._connection = manager, tokenizer, connection
        self._when_warm = when_warm
        self._sending = threading.Lock()
        self._num_sent: dict[str, int] = {}
        """Number of tokens already sent, by name of the open request."""
        self._has_ended = False
        self._last_pulse = 0.0

    def serve(self) -> None:
        """Serves until the client closes or its process has ended, and then cancels the open requests."""
        model = self._manager.model
        self._manager.listen(self._send_progress)
        try:
            most, context = self._manager.most_tokens, context_of(model.config)
            about_draft = self._manager.engine.drafting.about
            adapters = tuple(self._manager.adapters)
            is_warm = self._manager.is_warm
            self._send(Served(model.config, model.generation_config, most, context, about_draft, adapters, is_warm))
            while True:
                if not is_warm and self._manager.is_warm:
                    is_warm = True
                    self._send(Warm())
                    if self._when_warm is not None:
                        threading.Thread(target=self._when_warm, daemon=True).start()
                self._pulse()
                if not self._connection.poll(SECONDS_BETWEEN_LOOKS):
                    self._look_for_the_end()
                elif (message := self._connection.recv()) is not None:
                    self._handle(message)
                else:
                    break
        except (EOFError, OSError):
            pass
        for request_id in list(self._num_sent):
            self._manager.cancel_request(request_id)

    def _handle(self, message: Any) -> None:
        if isinstance(message, AddRequest):
            self._send(self._added(message))
        elif isinstance(message, CancelRequest):
            self._manager.cancel_request(message.request_id)
        elif isinstance(message, AskState):
            self._send(State(message.number, self._manager.state))

    def _added(self, message: AddRequest) -> AddReply:
        self._num_sent[message.request_id] = 0
        stop_strings, criteria = message.generation_config.stop_strings, StoppingCriteriaList()
        grammar = getattr(message.generation_config, "grammar", None)
        penalties, processors = (message.presence_penalty, message.frequency_penalty), LogitsProcessorList()
        try:
            if any(penalties):
                processors.append(OccurrencePenalty(len(message.input_ids), *penalties))
            if stop_strings:
                criteria.append(StopStringCriterion(self._tokenizer, stop_strings))
            self._manager.add_request(
                message.input_ids,
                message.request_id,
                streaming=message.streaming,
                generation_config=message.generation_config,
                seed=message.seed,
                model_inputs=message.model_inputs,
                top_logprobs=None if message.logprobs is None else message.logprobs.best,
                logprobs_mode=None if message.logprobs is None else message.logprobs.mode,
                grammar=grammar,
                grammar_after=message.grammar_after,
                tokenizer=None if grammar is None else self._tokenizer,
                adapter=message.adapter,
                priority=message.priority,
                stop_strings=[],  # the criterion has them
                stopping_criteria=criteria or None,
                logits_processor=processors or None,
            )
        except Exception as error:  # an error of a request's options fails only that request
            del self._num_sent[message.request_id]
            return AddReply.refused(message.request_id, error)
        return AddReply(message.request_id)

    def _send_progress(self, outputs: list[SpeculativeGenerationOutput]) -> None:
        """Sends a step's new tokens; called by the manager's thread while the device runs the next step."""
        parts = []
        for output in outputs:
            tokens, name = output.generated_tokens, output.request_id
            if name not in self._num_sent:
                continue  # not a request of the client
            new = slice(self._num_sent[name], None)
            of_new = output.logprobs[new], output.top_logprobs[new]
            by_options = output.fails_by_its_options or output.error == NOTHING_TO_CHOOSE
            ending = output.status, output.error, output.finish_reason, by_options
            parts.append(Progress(name, tokens[new], *ending, *of_new, output.num_cached_tokens))
            if output.is_finished():
                del self._num_sent[name]
            else:
                self._num_sent[name] = len(tokens)
        try:
            self._look_for_the_end()
            self._send(parts)
        except OSError:
            pass  # the client has gone, which `serve` handles

    def _pulse(self) -> None:
        """Sends now and then how far the manager is, if it has something to do."""
        now = time.monotonic()
        if self._num_sent and now - self._last_pulse >= SECONDS_BETWEEN_LOOKS:
            self._last_pulse = now
            self._send(Pulse(*self._manager.progress))

    def _look_for_the_end(self) -> None:
        error = self._manager.background_thread_status.fatal_error
        if error is not None and not self._has_ended:
            self._has_ended = True
            self._send(Ended(f"{type(error).__name__}: {error}"))

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)
