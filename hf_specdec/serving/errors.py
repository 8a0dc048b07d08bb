"""Errors of requests, and what clients are told of them: 4xx for what a request asks, 5xx for all other failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.utils import logging

from .characters import cut, escaped


logger = logging.get_logger(__name__)

MOST_OF_A_REASON = 200
"""Most characters of a message that is not ours, and may consist of what the request has."""


class RequestRefused(ValueError):
    """
    Raised for a request that cannot be served as it is: it was found wrong before its first token.

    Args:
        reason (`str`): what is wrong, and the remedy.
    """


class UnknownModel(RequestRefused):
    """Raised for a request that names a model, or an adapter, that is not served."""


@contextmanager
def refusing(*kinds: type[Exception], says: str = "") -> Iterator[None]:
    """
    A context in which errors of some kinds are the request's fault: `RequestRefused`. Their messages are cut, since
    they may cite all that the request has.

    Args:
        kinds (`type`): the kinds of errors.
        says (`str`): what comes before their messages.
    """
    try:
        yield
    except kinds as error:
        raise RequestRefused(says + cut(str(error), MOST_OF_A_REASON)) from error


class RequestFailed(Exception):
    """
    Raised for a request that has ended with an error.

    Args:
        reason (`str`): the error of its result.
        is_its_own (`bool`): whether the request's options are at fault rather than the server.
    """

    def __init__(self, reason: str, is_its_own: bool):
        super().__init__(reason)
        self.is_its_own = is_its_own


class TimedOut(Exception):
    """Raised for an answer that takes longer than the server allows."""


def unexpected(error: BaseException) -> str:
    """What clients are told of an error that is no fault of theirs. The log gets all of it."""
    logger.error("An unexpected error in a request.", exc_info=error)
    return without_details(error)


def without_details(error: BaseException) -> str:
    """An error in words that tell nothing of the server."""
    return f"An unexpected {type(error).__name__}, of which the server's log tells more."


def error_object(status: int, kind: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it, in an answer or in a stream; the message may cite what cannot be sent."""
    return {"message": escaped(message), "type": kind, "code": status}


def error_in_stream(error: Exception) -> dict[str, Any]:
    """The `error_object` of an exception that ends a stream, whose HTTP status has been sent."""
    if isinstance(error, RequestFailed) and error.is_its_own:
        return error_object(400, "invalid_request_error", str(error))
    if isinstance(error, CBWorkerDeadError):
        return error_object(503, "engine_error", str(error))
    if isinstance(error, TimedOut):
        return error_object(504, "timeout_error", str(error))
    return error_object(500, "server_error", str(error) if isinstance(error, RequestFailed) else unexpected(error))
