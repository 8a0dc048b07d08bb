"""Messages between the HTTP server and its engine, pickled and sent through a pipe."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from ...adapters import Choice
from ...batching import ManagerState
from ...engine.request import FinishReason
from ...grammar import FreeBeginning
from ...verification.log_probabilities import LogprobOptions


# ------------------------------------------------------------------------------------------------------- to the engine


@dataclass(frozen=True)
class AddRequest:
    """
    A new request.

    Args:
        request_id (`str`): the request's name.
        input_ids (`list[int]`): the prompt.
        generation_config (`GenerationConfig`): all options of the request.
        seed (`int`, *optional*): see `SpeculativeBatchingManager.add_request`.
        streaming (`bool`): whether tokens are sent at every step, and not only at the end.
        model_inputs (`dict[str, Any]`, *optional*): what the model reads beside the tokens, as arrays.
        logprobs (`LogprobOptions`, *optional*): the log-probabilities that are asked for.
        priority (`int`), adapter (`str`, *optional*): see `SpeculativeBatchingManager.add_request`.
        presence_penalty (`float`), frequency_penalty (`float`): see `OccurrencePenalty`.
        grammar_after (`FreeBeginning`, *optional*): what comes before the text of the config's grammar.
    """

    request_id: str
    input_ids: list[int]
    generation_config: GenerationConfig
    seed: int | None
    streaming: bool
    model_inputs: dict[str, Any] | None = None
    logprobs: LogprobOptions | None = None
    priority: int = 0
    adapter: Choice = ...
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar_after: FreeBeginning | None = None


@dataclass(frozen=True)
class CancelRequest:
    """A request is to be cancelled, because its client has gone."""

    request_id: str


@dataclass(frozen=True)
class AskState:
    """The server asks for a `State` with the same number."""

    number: int


# ----------------------------------------------------------------------------------------------------- from the engine


@dataclass(frozen=True)
class Served:
    """
    An engine's models are loaded.

    Args:
        config (`PreTrainedConfig`), generation_config (`GenerationConfig`): configs of the target.
        most_tokens (`int`): most tokens of a text, its prompt included, for which there is memory.
        context (`int`, *optional*): most tokens of a text that the model has been made for.
        about_draft (`str`, *optional*): see `Drafting.about`.
        adapters (`tuple[str, …]`): names of the adapters that requests can choose.
        is_warm (`bool`): whether no warm-up is to come.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig
    most_tokens: int
    context: int | None = None
    about_draft: str | None = None
    adapters: tuple[str, ...] = ()
    is_warm: bool = True

    @property
    def longest_text(self) -> int:
        """Most tokens of a text that there is memory for, and that the model has been made for."""
        return min(self.most_tokens, self.context or self.most_tokens)


@dataclass(frozen=True)
class Stage:
    """Sent before the engine is loaded: what it does now."""

    text: str


@dataclass(frozen=True)
class Warm:
    """A warm-up has ended."""


@dataclass(frozen=True)
class NotServed:
    """
    The last message of an engine that cannot start.

    Args:
        option (`str`): the command-line argument at fault.
        reason (`str`): what is wrong with the argument.
    """

    option: str
    reason: str


@dataclass(frozen=True)
class AddReply:
    """
    A request has been admitted or refused.

    Args:
        request_id (`str`): the request's name.
        kind (`str`, *optional*): class name of the error that refuses the request; None if it is admitted.
        reason (`str`): message of that error.
    """

    request_id: str
    kind: str | None = None
    reason: str = ""

    @classmethod
    def refused(cls, request_id: str, error: Exception) -> AddReply:
        """The message of a refusal, for the error that `add_request` raised."""
        kind = next((name for name, one in REFUSALS.items() if isinstance(error, one)), None)
        if kind is None:
            return cls(request_id, RuntimeError.__name__, f"{type(error).__name__}: {error}")
        return cls(request_id, kind, str(error))

    @property
    def error(self) -> Exception | None:
        """The error that refuses the request; None if it is admitted."""
        return None if self.kind is None else REFUSALS.get(self.kind, RuntimeError)(self.reason)


REFUSALS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "Full": queue.Full}


class Progress(NamedTuple):
    """
    New tokens and status of one request after a step.

    Args:
        request_id (`str`): the request's name.
        tokens (`list[int]`): tokens that have not been sent before.
        status (`RequestStatus`), error (`str`, *optional*), finish_reason (`str`, *optional*), fails_by_its_options
            (`bool`): as in a `SpeculativeGenerationOutput`.
        logprobs (`Sequence[float]`), top_logprobs (`Sequence[list]`): those of the tokens, if they are asked for.
        num_cached_tokens (`int`): as in a `SpeculativeGenerationOutput`.
    """

    request_id: str
    tokens: list[int]
    status: RequestStatus
    error: str | None
    finish_reason: FinishReason | None = None
    fails_by_its_options: bool = False
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[list[tuple[int, float]]] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class State:
    """The manager's state, in answer to the `AskState` with the same number."""

    number: int
    state: ManagerState


@dataclass(frozen=True)
class Pulse:
    """
    Sent twice a second while there are requests, so that the server knows whether forwards end.

    Args:
        counts (`tuple[int, ...]`): counts of which one grows with every forward.
        is_preparing (`bool`): whether the engine warms up, compiles or captures.
    """

    counts: tuple[int, ...]
    is_preparing: bool


@dataclass(frozen=True)
class Ended:
    """The manager has ended with an error, and takes no more requests."""

    error: str
