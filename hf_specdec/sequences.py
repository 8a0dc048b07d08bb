"""The token sequences of a call: a batch of rows that grow by different numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch


if TYPE_CHECKING:
    from .engine.request import Request


class Rows(Protocol):
    """
    What a drafter reads of the rows for which it proposes: the `Sequences` of a call, or the `StepRows` of a step of
    requests in flight.
    """

    batch_size: int
    device: torch.device
    lengths: list[int]
    """Tokens of every row, prompt and root included."""

    def room(self, row: int) -> int:
        """Most draft tokens that a step of this row can accept: the bonus or recovered token takes the last place."""

    def last_tokens(self, count: int) -> torch.Tensor:
        """The last `count` tokens of all rows, which must be equally long, `[batch, count]`, int64."""

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """The tokens at the given positions of every row, `[batch, positions]`, int64."""

    def new_tokens(self, row: int) -> list[int]:
        """The tokens of a row after its prompt."""


EXPECTED_NEW_TOKENS = 1024
"""New tokens of a text without a maximum length for which memory with CUDA graphs is borrowed."""


class Sequences:
    """
    The prompts and what has been generated, one row per sequence. Rows differ in length once they accept different
    numbers of tokens.

    Args:
        input_ids (`torch.Tensor` of shape `[batch, prompt]`, integers): the prompts.
        visible (`torch.Tensor` of shape `[batch, prompt]`, bool, *optional*): which entries of `input_ids` are tokens,
            where some are padding.
        max_length (`int`, *optional*): no row grows past this many tokens.
        end_tokens (`list[int]`, *optional*): a row that ends in one of these rests.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        visible: torch.Tensor | None = None,
        max_length: int | None = None,
        end_tokens: list[int] | None = None,
    ):
        self.batch_size, self.prompt_length = input_ids.shape
        self.visible = visible
        self.device = input_ids.device
        self.max_length = max_length
        self.most_known: int | None = None
        """Tokens of a row that have positions which the target knows; None for any number."""
        self.end_tokens = frozenset(end_tokens or ())
        self._ids = input_ids.new_zeros(self.batch_size, self._capacity(self.prompt_length), dtype=torch.long)
        self._ids[:, : self.prompt_length] = input_ids
        self.lengths = [self.prompt_length] * self.batch_size
        """Tokens of every row, prompt and root included."""
        self.resting = [False] * self.batch_size
        """
        Whether a row does not grow, for now or for good: it ended in an end token, reached its `limit`, or was
        finished.
        """

    def _capacity(self, length: int) -> int:
        capacity = max(2 * length, length + 256)
        return capacity if self.max_length is None else min(capacity, max(self.max_length, length))

    def row(self, row: int, length: int | None = None) -> torch.Tensor:
        """The first `length` tokens (default: all) of a row, `[1, length]`, int64; a view."""
        return self._ids[row : row + 1, : self.lengths[row] if length is None else length]

    def columns(self, length: int) -> torch.Tensor:
        """The first `length` tokens of all rows, `[batch, length]`, int64; a view."""
        return self._ids[:, :length]

    def last_tokens(self, count: int) -> torch.Tensor:
        """The last `count` tokens of all rows, which must be equally long, `[batch, count]`, int64; a view."""
        return self._ids[:, self.lengths[0] - count : self.lengths[0]]

    def tokens(self, row: int, start: int) -> list[int]:
        """The tokens of a row from `start` on. Waits for the device."""
        return self._ids[row, start : self.lengths[row]].tolist()

    def new_tokens(self, row: int) -> list[int]:
        """The tokens of a row after the prompts. Waits for the device."""
        return self.tokens(row, self.prompt_length)

    def roots(self) -> torch.Tensor:
        """The last token of every row, `[batch, 1]`, int64."""
        if len(set(self.lengths)) == 1:
            return self._ids[:, self.lengths[0] - 1 : self.lengths[0]]
        last = torch.tensor(self.lengths, device=self.device)[:, None] - 1
        return self._ids.gather(1, last)

    @property
    def limit(self) -> int | None:
        """
        Length at which a row rests: the maximum length, or one more than `most_known`, because the last token of a
        text is not forwarded. None for none.
        """
        limits = (self.max_length, None if self.most_known is None else self.most_known + 1)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that does not rest; 0 if all do."""
        return max((length for length, rests in zip(self.lengths, self.resting, strict=True) if not rests), default=0)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row that does not rest; 0 if all do."""
        return min((length for length, rests in zip(self.lengths, self.resting, strict=True) if not rests), default=0)

    @property
    def expected_length(self) -> int:
        """Most tokens of a row, if it has a maximum length; else the prompt's and `EXPECTED_NEW_TOKENS`."""
        return self.prompt_length + EXPECTED_NEW_TOKENS if self.max_length is None else self.max_length

    def room(self, row: int) -> int:
        """
        Most draft tokens that a step of this row can accept: the bonus or recovered token takes the last place. Some
        large number if the row has no `limit`.
        """
        if self.resting[row]:
            return 0
        limit = self.limit
        return self._ids.shape[1] if limit is None else limit - self.lengths[row] - 1

    def write(self, row: int, position: int, tokens: list[int]) -> None:
        """Writes tokens into a row without changing its length; `row(…, length)` shows them, `extend` appends them."""
        end = position + len(tokens)
        if end > self._ids.shape[1]:
            self._grow(end)
        self._ids[row, position:end] = torch.tensor(tokens, device=self.device)

    def _grow(self, length: int) -> None:
        grown = self._ids.new_zeros(self.batch_size, max(length, 2 * self._ids.shape[1]))
        grown[:, : self._ids.shape[1]] = self._ids
        self._ids = grown

    def extend(self, row: int, tokens: list[int]) -> None:
        """Appends tokens to a row, up to its `limit` and to the first end token; with either the row rests."""
        if self.resting[row]:
            return
        limit = self.limit
        if limit is not None:
            tokens = tokens[: max(limit - self.lengths[row], 0)]
        for count, token in enumerate(tokens, start=1):
            if token in self.end_tokens:
                tokens, self.resting[row] = tokens[:count], True
                break
        self.write(row, self.lengths[row], tokens)
        self.lengths[row] += len(tokens)
        if limit is not None and self.lengths[row] >= limit:
            self.resting[row] = True

    def rest_at(self, most_known: int) -> None:
        """Sets `most_known`; rows that are already one token longer rest."""
        self.most_known = most_known
        self.resting = [rests or length > most_known for rests, length in zip(self.resting, self.lengths, strict=True)]

    def pass_last_position(self, rows: list[int]) -> None:
        """Lets `rows` grow past the last position that the target is said to know."""
        self.most_known = None
        for row in rows:
            self.resting[row] = False

    def finish(self, row: int, length: int) -> None:
        """Ends a row for good after its first `length` tokens."""
        self.lengths[row] = length
        self.resting[row] = True

    def fill(self, row: int, position: int, token: int) -> None:
        """Writes a padding token after the end of a finished row."""
        self.write(row, position, [token])

    def take(self, ids: torch.Tensor, lengths: list[int], resting: list[bool]) -> None:
        """
        Replaces the tokens of all rows by `ids` (`[batch, tokens]`, int64), which were generated elsewhere; `lengths`
        are the rows' lengths, and `resting` says which rows have ended.
        """
        if ids.shape[1] > self._ids.shape[1]:
            self._grow(ids.shape[1])
        self._ids[:, : ids.shape[1]] = ids
        self.lengths, self.resting = list(lengths), list(resting)

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """The tokens at the given positions of every row, `[batch, positions]`, int64."""
        return self._ids.gather(1, positions)


class StepRows:
    """
    The requests of a single step as `Rows`, which drafters read.

    Args:
        requests (`list[Request]`): the rows.
        device (`torch.device`): device of the tokens.
        starts (`list[int]`): position of the first token of every row that the drafter will read.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device, starts: Sequence[int]):
        self.requests, self.device = requests, device
        self.batch_size = len(requests)
        self.lengths = [request.length for request in requests]
        rows = [request.tokens[start:] for request, start in zip(requests, starts, strict=True)]
        width = max(map(len, rows))
        self._ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        self._starts = torch.tensor(starts, device=device)[:, None]

    def room(self, row: int) -> int:
        """Most draft tokens that a step of this row can use."""
        return self.requests[row].room

    def new_tokens(self, row: int) -> list[int]:
        """The tokens of a request after its prompt."""
        return self.requests[row].new_tokens

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """The tokens at the given positions of every row, `[batch, positions]`, int64."""
        return self._ids.gather(1, positions.to(self.device) - self._starts)

    def last_tokens(self, count: int) -> torch.Tensor:
        """The last `count` tokens of all rows, which must be equally long and have equal starts, `[batch, count]`."""
        return self._ids[:, self._ids.shape[1] - count :]
