"""The requests of one step, in the form in which drafters read token sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .request import Request


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

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """The tokens at the given positions of every row, `[batch, positions]`, int64."""
        return self._ids.gather(1, positions.to(self.device) - self._starts)

    def last_tokens(self, count: int) -> torch.Tensor:
        """The last `count` tokens of all rows, which must be equally long and have equal starts, `[batch, count]`."""
        return self._ids[:, self._ids.shape[1] - count :]
