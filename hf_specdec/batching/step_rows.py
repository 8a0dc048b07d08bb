"""The requests of one step, as the rows that drafters read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .request import Request


class StepRows:
    """
    What a drafter reads of `Sequences`, for requests that are together in one step only.

    Args:
        requests (`list[Request]`): the rows.
        device (`torch.device`): where tokens are wanted.
        starts (`list[int]`): the first token of every row that will be asked for.
    """

    visible = None

    def __init__(self, requests: Sequence[Request], device: torch.device, starts: Sequence[int]):
        self.requests, self.device = requests, device
        self.batch_size = len(requests)
        self.lengths = [request.length for request in requests]
        rows = [request.tokens[start:] for request, start in zip(requests, starts, strict=True)]
        width = max(map(len, rows))
        self._ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        self._starts = torch.tensor(starts, device=device)[:, None]

    def room(self, row: int) -> int:
        """How many draft tokens a step of this row can use."""
        return self.requests[row].room

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """The tokens at the given positions of every row, `[batch, positions]`, int64."""
        return self._ids.gather(1, positions.to(self.device) - self._starts)

    def columns(self, length: int) -> torch.Tensor:
        """The tokens before `length`, for rows that start and end alike, `[batch, tokens]`, int64."""
        return self._ids
