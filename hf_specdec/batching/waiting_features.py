"""Features of the target that wait until a head reads them, a few of every request, at places of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .request import Request


@dataclass(eq=False)
class Place:
    """
    That of a request.

    Args:
        number (`int`): which one it is.
        count (`int`): how many features wait there.
    """

    number: int
    count: int = 0


class WaitingFeatures:
    """
    A place for every request, `CAPACITY` features long. Steps on the device read them there, and write new ones behind
    those that stay; the host keeps count.

    Args:
        num_requests (`int`): most requests with a place.
        size (`int`), device (`torch.device`), dtype (`torch.dtype`): of a feature.
    """

    CAPACITY = 64
    """As many as may wait while speculation is off: then they are read, those of many requests together."""
    NOBODY = 0
    """The place that rows read which have none: it is never written."""
    UNWANTED = 1
    """The place that rows write which have none: it is never read."""

    def __init__(self, num_requests: int, size: int, device: torch.device, dtype: torch.dtype):
        self.held = torch.zeros(2 + num_requests, self.CAPACITY, size, device=device, dtype=dtype)
        """`[places, CAPACITY, size]`."""
        self._places: dict[Request, Place] = {}
        self._free = list(range(2, 2 + num_requests))

    def count(self, request: Request) -> int:
        """How many wait."""
        place = self._places.get(request)
        return 0 if place is None else place.count

    def counts(self, requests: Iterable[Request]) -> list[int]:
        """How many wait, of each."""
        place = self._places.get
        return [0 if (own := place(request)) is None else own.count for request in requests]

    def set_count(self, request: Request, count: int) -> None:
        """Says how many wait, of a request with a place."""
        self._places[request].count = count

    def add(self, request: Request, count: int) -> None:
        """So many more wait, of a request with a place."""
        self._places[request].count += count

    def place(self, request: Request) -> int:
        """Where those of a request are; a place of its own if it has none."""
        place = self._places.get(request)
        if place is None:
            self._places[request] = place = Place(self._free.pop())
            self.held[place.number] = 0.0  # what nobody masks may be no number
        return place.number

    def forget(self, request: Request) -> None:
        """Gives the request's place to others."""
        place = self._places.pop(request, None)
        if place is not None:
            self._free.append(place.number)

    def of(self, requests: list[Request], most: int) -> torch.Tensor:
        """The first features of each, `[batch, most, size]`; what lies behind those that wait is of no account."""
        return self.held[self._index(requests), :most]

    def put(self, requests: list[Request], features: torch.Tensor, counts: list[int]) -> None:
        """Adds the first so many of `features` (`[batch, tokens, size]`), for which there is room, to each."""
        starts = [self.count(request) for request in requests]
        ends = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)])
        # Rows with fewer write their last one again.
        tokens = torch.arange(features.shape[1]).minimum(torch.tensor(counts)[:, None] - 1)
        tokens, places = (values.to(self.held.device) for values in (tokens, tokens + torch.tensor(starts)[:, None]))
        rows = torch.arange(len(requests), device=self.held.device)[:, None]
        self.held[self._index(requests)[:, None], places] = features[rows, tokens]
        for request, end in zip(requests, ends.tolist(), strict=True):
            self.set_count(request, end)

    def keep_last(self, requests: list[Request]) -> None:
        """Lets only the last one of each wait."""
        index = self._index(requests)
        last = torch.tensor([self.count(request) - 1 for request in requests], device=self.held.device)
        self.held[index, 0] = self.held[index, last]
        for request in requests:
            self.set_count(request, 1)

    def _index(self, requests: list[Request]) -> torch.Tensor:
        return torch.tensor([self.place(request) for request in requests], device=self.held.device)
