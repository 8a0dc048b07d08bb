"""What the server and its engine tell each other. All of it goes through a pipe, pickled."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import NamedTuple

from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from ...batching import ManagerState


# ------------------------------------------------------------------------------------------------------- to the engine


@dataclass(frozen=True)
class AddRequest:
    """
    Asks for a text.

    Args:
        request_id (`str`): its name.
        input_ids (`list[int]`): the prompt.
        generation_config (`GenerationConfig`): all its options.
        seed (`int`, *optional*): see `SpeculativeBatchingManager.add_request`.
        streaming (`bool`): whether tokens are told at every step, and not at the end alone.
    """

    request_id: str
    input_ids: list[int]
    generation_config: GenerationConfig
    seed: int | None
    streaming: bool


@dataclass(frozen=True)
class CancelRequest:
    """Nobody waits for this one any more."""

    request_id: str


@dataclass(frozen=True)
class AskState:
    """Asks for a `State` with the same number."""

    number: int


# ----------------------------------------------------------------------------------------------------- from the engine


@dataclass(frozen=True)
class Served:
    """
    The first message: the model is there.

    Args:
        config (`PreTrainedConfig`), generation_config (`GenerationConfig`): the model's.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig


@dataclass(frozen=True)
class NotServed:
    """
    The first message, if there will be no model.

    Args:
        option (`str`): the argument of the command line that stands against it.
        reason (`str`): what is wrong with it.
    """

    option: str
    reason: str


@dataclass(frozen=True)
class Admission:
    """
    A request has been taken, or refused.

    Args:
        request_id (`str`): its name.
        kind (`str`, *optional*), reason (`str`): the name of the error that refuses it, and what that says.
    """

    request_id: str
    kind: str | None = None
    reason: str = ""

    @classmethod
    def refused(cls, request_id: str, error: Exception) -> Admission:
        """With the error that `add_request` raised."""
        kind = next((name for name, one in REFUSALS.items() if isinstance(error, one)), None)
        if kind is None:
            return cls(request_id, RuntimeError.__name__, f"{type(error).__name__}: {error}")
        return cls(request_id, kind, str(error))

    @property
    def error(self) -> Exception | None:
        """What refuses the request, if anything does."""
        return None if self.kind is None else REFUSALS.get(self.kind, RuntimeError)(self.reason)


REFUSALS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "Full": queue.Full}


class Progress(NamedTuple):
    """
    What a step has brought one request.

    Args:
        request_id (`str`): its name.
        tokens (`list[int]`): those that nobody has been told.
        status (`RequestStatus`), error (`str`, *optional*): as of a `GenerationOutput`.
    """

    request_id: str
    tokens: list[int]
    status: RequestStatus
    error: str | None


@dataclass(frozen=True)
class State:
    """What the manager is doing."""

    number: int
    state: ManagerState


@dataclass(frozen=True)
class Ended:
    """The manager has ended with an error, and takes no more requests."""

    error: str
