"""Questions about models that several parts of a call ask: the answers hold as long as nobody changes the models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar


Answer = TypeVar("Answer")

_answers: ContextVar[dict[Any, Any] | None] = ContextVar("answers about models", default=None)


@contextmanager
def asking_once() -> Iterator[None]:
    """
    A context in which models stay as they are: modules, weights, hooks, mode and attention. In this thread each
    function `asked_once` works out its answer for a model once. A context within another one asks anew.
    """
    token = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(token)


def asked_once(function: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """
    Makes a function of a model, which only looks at it, give the same answer again inside `asking_once`. The answer
    must not be changed.
    """

    @functools.wraps(function)
    def answer_of(model: Any) -> Answer:
        answers = _answers.get()
        if answers is None:
            return function(model)
        key = function, id(model)
        if key not in answers:
            answers[key] = function(model), model  # which keeps its id
        answer: Answer = answers[key][0]
        return answer

    return answer_of
