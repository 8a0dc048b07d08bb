"""The target's feature of the last committed token but one of every request: a store of one feature per place."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .pending_features import PendingFeatures


if TYPE_CHECKING:
    from ..engine.request import Request


class LastFeatures(PendingFeatures):
    """
    A store whose places hold the newest feature alone, for drafts that read no earlier ones: nothing waits to be read,
    and there is always room.

    Args:
        num_requests (`int`): most requests with a place.
        size (`int`): size of a feature.
        device (`torch.device`), dtype (`torch.dtype`): device and dtype of the features.
    """

    slot_step = 0

    def __init__(self, num_requests: int, size: int, device: torch.device, dtype: torch.dtype):
        super().__init__(num_requests, size, device, dtype, capacity=1)
        self.capacity = sys.maxsize

    @property
    def widths(self) -> list[int]:
        return []

    def first_slot(self, place: int) -> int:
        return place

    def write(self, slots: torch.Tensor, features: torch.Tensor, accepted: torch.Tensor) -> None:
        last = accepted.clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
        slots = torch.where(accepted < 0, self.trash_slot, slots)
        self.held[:, 0].index_copy_(0, slots, features.gather(1, last)[:, 0].to(self.held))

    def counts(self, requests: Iterable[Request]) -> list[int]:
        return [0 for _ in requests]

    def add(self, requests: Iterable[Request], counts: Iterable[int]) -> None:
        return

    def put_last(self, requests: list[Request], features: torch.Tensor) -> None:
        """Replaces the feature of each request by one of `features` (`[batch, size]`)."""
        self.held[self.places(requests), 0] = features.to(self.held)
        for request in requests:
            self.set_count(request, 1)

    def wipe(self, request: Request, first: int | None = None) -> None:
        """Zeroes a request's place where nothing is taken of what was written there (`first`)."""
        if first is not None:
            super().wipe(request, first)
