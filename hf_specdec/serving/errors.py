"""Errors of requests, and what clients are told of them: 4xx for what a request asks, 5xx for all other failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


logger = logging.get_logger(__name__)


class RequestRefused(ValueError):
    """
    Raised for a request that cannot be served as it is: it was found wrong before its first token.

    Args:
        reason (`str`): what is wrong, and the remedy.
    """


@contextmanager
def refusing() -> Iterator[None]:
    """A context in which errors of value or type are the request's fault: `RequestRefused`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RequestRefused(str(error)) from error


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


class ErrorText(str):
    """An error message that is escaped when formatted: transformers' stream handlers put it between JSON quotes."""

    def __format__(self, spec: str) -> str:
        return json.dumps(self)[1:-1]


def unexpected(error: BaseException) -> ErrorText:
    """What clients are told of an error that is no fault of theirs. The log gets all of it."""
    logger.error("An unexpected error in a request.", exc_info=error)
    return ErrorText(f"An unexpected {type(error).__name__}, of which the server's log tells more.")
