"""Logits processors of a user's own for tests: with state of all kinds, and with entries for the rows of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from .models import VOCAB


Text = list[list[int]]
"""What plain `generate` writes without any option, `[batch][new tokens]`."""


class BansTokenBeforeLast(LogitsProcessor):
    """Reads the history alone."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -2:-1], -torch.inf)


class WritesInPlace(LogitsProcessor):
    """Changes the very tensor it is given, and returns it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores -= 1.0
        scores.scatter_(1, input_ids[:, -3:], -torch.inf)
        return scores


class CountsCalls(LogitsProcessor):
    """Bans the best token in every third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.scatter(1, scores.argmax(1, True), -torch.inf) if self.calls % 3 == 0 else scores


class Alternates(LogitsProcessor):
    """Prefers odd tokens in one call, and even ones in the next."""

    def __init__(self) -> None:
        self.even = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.even = not self.even
        scores[:, int(self.even) :: 2] -= 0.4
        return scores


class KeepsRunningSets(LogitsProcessor):
    """Remembers the last tokens it was called with, a set for every row, and never lets them come again."""

    def __init__(self, batch_size: int | None = None) -> None:
        self.seen: Any = None if batch_size is None else [set() for _ in range(batch_size)]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.seen is None:
            self.seen = [set() for _ in input_ids]
        for row, seen in enumerate(self.seen):
            seen.add(int(input_ids[row, -1]))
            scores[row, sorted(seen)] = -torch.inf
        return scores


class BiasOfRows(LogitsProcessor):
    """Adds a tensor of `[batch, vocab]`, or of more rows."""

    def __init__(self, bias: torch.Tensor):
        self.bias = bias

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.bias[: len(input_ids)] * (1 + input_ids[:, -1:] % 2)


class TokensOfRows(LogitsProcessor):
    """Bans other tokens in every row, by a container with an entry per row."""

    def __init__(self, banned: Any):
        self.banned = banned

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(input_ids)):
            scores[row, self.banned[row]] = -torch.inf
        return scores


class Holder:
    """An object that a processor may hold: what it knows of the rows is not to be seen from outside."""

    def __init__(self, banned: list[list[int]]):
        self._banned = banned

    def __getitem__(self, row: int) -> list[int]:
        return self._banned[row]


def tokens_of_rows_in_the_class(banned: Text) -> LogitsProcessor:
    """The same, with the entries as an attribute of the class."""

    class InTheClass(LogitsProcessor):
        __call__ = TokensOfRows.__call__

    InTheClass.banned = banned
    return InTheClass()


class TokensOfRowsInSlots(LogitsProcessor):
    """Has its entries per row in a slot."""

    __slots__ = ("banned",)
    __init__, __call__ = TokensOfRows.__init__, TokensOfRows.__call__


class MakesRowsWhenCalled(LogitsProcessor):
    """Learns the number of rows from its first call, as a processor must that is made before it is known."""

    def __init__(self, kind: type):
        self.of_rows = kind()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(input_ids)):
            if isinstance(self.of_rows, dict):
                self.of_rows[row] = self.of_rows.get(row, 5 * row) + 1
            elif len(self.of_rows) == row:
                self.of_rows.append(5 * row + 1)
            else:
                self.of_rows[row] += 1
            scores[row, self.of_rows[row] % VOCAB] += 50
        return scores


class NumbersRows(LogitsProcessor):
    """Holds nothing, and now and then prefers another token in every row."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(scores))
        scores[rows, rows + 7 + input_ids[:, -1] % 2] += 3 * (input_ids.shape[1] % 4 == 0)
        return scores


class OneRow(LogitsProcessor):
    """Now and then prefers a token, in one row alone or in those of a set."""

    def __init__(self, rows: int | set[int]):
        self.rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in {self.rows} if isinstance(self.rows, int) else self.rows:
            scores[row, 9 + input_ids[row, -1] % 2] += 3 * (input_ids.shape[1] % 4 == 0)
        return scores


class AsksModel(LogitsProcessor):
    """Contrasts with the model's own opinion after the last two tokens only; holds the model, and counts."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        opinion = self.model(input_ids[:, -2:]).logits[:, -1].float()
        return scores - (0.1 + 0.05 * (self.calls % 2)) * opinion


class AsksTokenizer(LogitsProcessor):
    """Bans tokens that continue a word, every other time; holds a tokenizer, and counts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for row, text in enumerate(self.tokenizer.batch_decode(input_ids[:, -1:])):
            if text.startswith(" ") and self.calls % 2:
                scores[row, 4:30] -= 1.0
        return scores


class CannotBeCopied(LogitsProcessor):
    """Holds what Python cannot copy."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.calls += 1
        scores[:, self.calls % 2 :: 2] -= 0.5
        return scores


class Counter:
    """A user's object whose method is passed as a processor."""

    def __init__(self) -> None:
        self.calls = 0

    def process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 3 :: 3] -= 1.0
        return scores


def bias_of_rows(batch_size: int, width: int = VOCAB, scale: float = 0.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return scale * torch.randn(batch_size, width, generator=generator)


def closure_over_rows(batch_size: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    bias = bias_of_rows(batch_size)

    def add_bias(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(bias)
        return scores + bias * (1 + input_ids[:, -1:] % 2)

    return add_bias


def closure_with_state(model: PreTrainedModel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function that counts its calls, remembers tokens in a list, and refers to a model."""
    import math  # a module that a function closes over

    calls, seen = 0, []

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seen.append(input_ids[:, -1:])
        assert model is not None and all(len(tokens) == len(input_ids) for tokens in seen)
        scores = scores.scatter(1, torch.cat(seen[-4:], dim=1), -math.inf)
        return scores.scatter(1, scores.argmax(1, True), -torch.inf) if calls % 3 == 0 else scores

    return process


def calls_with(process: Callable, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return process(input_ids, scores)


class CallsFunction(LogitsProcessor):
    """Leaves the work to a function that it holds."""

    def __init__(self, process: Callable):
        self.process = process

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.process(input_ids, scores)


class CallsFunctions(LogitsProcessor):
    """Holds functions in a list, in an object and in defaults."""

    def __init__(self, *functions: Callable):
        self.functions = list(functions[:1])
        self.inner = CallsFunction(functions[1])
        self.last = lambda input_ids, scores, function=functions[2]: function(input_ids, scores)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for function in (*self.functions, self.inner, self.last):
            scores = function(input_ids, scores)
        return scores


class CopiesItself(LogitsProcessor):
    """Holds what Python cannot copy, and says how it is copied."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0
        self.process = lambda scores: scores if self.lock.locked() else scores

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 2 :: 2] -= 0.5
        return self.process(scores)


def counts_with(counter: Counter, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return counter.process(input_ids, scores)


# ------------------------------------------------------------------------------------- state that several share


class CountsInto(LogitsProcessor):
    """Counts its calls in an object of others."""

    def __init__(self, counter: Counter):
        self.counter = counter

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.counter.calls += 1
        return scores


def closures_over_a_number() -> list[Any]:
    """One function counts, by another function, and a third one reads the count."""
    calls = 0

    def increase() -> None:
        nonlocal calls
        calls += 1

    def count(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        increase()
        return scores

    def bias(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, calls % 3 :: 3] -= 1.0
        return scores

    return [count, bias]


def functions_with_attributes() -> list[Any]:
    """One function counts in an attribute of its own, which another one reads."""

    def count(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        count.calls += 1
        return scores

    def bias(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, count.calls % 3 :: 3] -= 1.0
        return scores

    count.calls = 0
    return [count, bias]


class HidesFunction(LogitsProcessor):
    """Calls a function that it holds in a private slot."""

    __slots__ = ("__function",)

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        self.__function = function

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.__function(input_ids, scores)


def processors_of_one_counter() -> list[Any]:
    counter = Counter()
    return [CountsInto(counter), counter.process]
