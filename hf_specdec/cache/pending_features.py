"""Target features that wait until an EAGLE head reads them: a store with one place per request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from ..engine.request import Request


@dataclass(eq=False)
class Place:
    """
    A request's place in the store.

    Args:
        number (`int`): index of the place.
        count (`int`): number of features that wait there.
    """

    number: int
    count: int = 0


class PendingFeatures:
    """
    A store of target features, with a place for `capacity` features per request. Captured steps read features from it
    and write new ones after the unread ones; the host keeps the counts. A full place makes the head read, as now and
    then while speculation is off: such a step is launched alone, so that the device waits for the host twice.

    Args:
        num_requests (`int`): most requests with a place.
        size (`int`): size of a feature.
        device (`torch.device`), dtype (`torch.dtype`): device and dtype of the features.
        capacity (`int`): most features that wait per request; see `capacity_for`.
    """

    LEAST_CAPACITY, MOST_CAPACITY = 64, 256
    """The two numbers of features that may wait per request, see `capacity_for`."""
    MOST_BYTES = 256 * 2**20
    """Most bytes of all places with the larger capacity."""
    DUMMY = 0
    """The place that rows without one read from; it is never written."""
    TRASH = 1
    """The place that rows without one write to; it is never read."""

    def __init__(self, num_requests: int, size: int, device: torch.device, dtype: torch.dtype, capacity: int):
        self.capacity = capacity
        self.held = torch.zeros(2 + num_requests, self.capacity, size, device=device, dtype=dtype)
        """The features, `[places, capacity, size]`."""
        self._places: dict[Request, Place] = {}
        self._free = list(range(2, 2 + num_requests))
        self._with_nan: set[int] = set()
        """Places that may hold NaN. Slots after a request's features may be read, and must hold none."""

    @classmethod
    def capacity_for(cls, num_requests: int, num_bytes: int) -> int:
        """
        Most features, of `num_bytes` each, that may wait for each of `num_requests` requests: the larger bound if it
        takes at most `MOST_BYTES` in all, else the least. (Both are widths for which forwards are captured.)
        """
        fits = cls.MOST_CAPACITY * num_requests * num_bytes <= cls.MOST_BYTES
        return cls.MOST_CAPACITY if fits else cls.LEAST_CAPACITY

    slot_step = 1
    """Slots by which a new feature moves the place of the next one on."""

    def write(self, slots: torch.Tensor, features: torch.Tensor, accepted: torch.Tensor) -> None:
        """
        Writes a step's new features, `[rows, tokens, size]`, from the rows' `slots` (`[rows]`) on, of which the first
        is taken, and as many as `accepted` (`[rows]`) after it; none if `accepted` is negative.
        """
        if features.shape[1] > 1:
            slots = (slots[:, None] + torch.arange(features.shape[1], device=slots.device)).flatten()
        self.held.flatten(0, 1).index_copy_(0, slots, features.flatten(0, 1).to(self.held))

    @property
    def widths(self) -> list[int]:
        """Numbers of features per request for which a head's read is captured, rising; mostly few features wait."""
        return sorted({self.LEAST_CAPACITY, self.capacity})

    def width_for(self, most: int) -> int:
        """The width at which to read places that hold at most so many features."""
        return next(width for width in self.widths if width >= most)

    def first_slot(self, place: int) -> int:
        """Index of a place's first slot, counted through all places."""
        return place * self.capacity

    @property
    def trash_slot(self) -> int:
        """The first slot of `TRASH`."""
        return self.first_slot(self.TRASH)

    def count(self, request: Request) -> int:
        """Number of features of a request that wait."""
        place = self._places.get(request)
        return 0 if place is None else place.count

    def counts(self, requests: Iterable[Request]) -> list[int]:
        """Number of features that wait, for each request."""
        place = self._places.get
        return [0 if (own := place(request)) is None else own.count for request in requests]

    def set_count(self, request: Request, count: int) -> None:
        """Sets the number of pending features of a request that has a place."""
        self._places[request].count = count

    def add(self, requests: Iterable[Request], counts: Iterable[int]) -> None:
        """Adds `counts` to the numbers of pending features of those requests that have a place."""
        place = self._places.get
        for request, count in zip(requests, counts, strict=True):
            if (own := place(request)) is not None:
                own.count += count

    def place(self, request: Request) -> int:
        """Index of the request's place; a request without one gets a free place, zeroed if it may hold NaN."""
        place = self._places.get(request)
        if place is None:
            self._places[request] = place = Place(self._free.pop())
            if place.number in self._with_nan:
                self._with_nan.remove(place.number)
                self.held[place.number] = 0.0
        return place.number

    def mark_nan(self, request: Request) -> None:
        """Takes note that the request's place may hold NaN: the next request that gets it finds it zeroed."""
        place = self._places.get(request)
        if place is not None:
            self._with_nan.add(place.number)

    def wipe(self, request: Request, first: int | None = None) -> None:
        """Zeroes a request's place from its slot `first` on; by default, after the features that wait there."""
        place = self._places.get(request)
        if place is not None:
            self.held[place.number, place.count if first is None else first :] = 0.0

    def forget(self, request: Request) -> None:
        """Frees the request's place."""
        place = self._places.pop(request, None)
        if place is not None:
            self._free.append(place.number)

    def of(self, requests: list[Request], most: int) -> torch.Tensor:
        """The first `most` slots of each request's place, `[batch, most, size]`; slots past `count` are undefined."""
        return self.held[self.places(requests), :most]

    def put(self, requests: list[Request], features: torch.Tensor, counts: list[int]) -> None:
        """Adds the first `counts` of `features` (`[batch, tokens, size]`) to each request, which must have room."""
        starts = [self.count(request) for request in requests]
        device = self.held.device
        first, most = torch.tensor([starts, counts], device=device)[:, :, None]
        # Rows with fewer features write their last one again.
        tokens = torch.arange(features.shape[1], device=device).minimum(most - 1)
        rows = torch.arange(len(requests), device=device)[:, None]
        self.held[self.places(requests)[:, None], first + tokens] = features[rows, tokens]
        for request, start, count in zip(requests, starts, counts, strict=True):
            self.set_count(request, start + count)

    def keep_last(self, requests: list[Request]) -> None:
        """Drops all pending features but the last of each request."""
        index = self.places(requests)
        last = torch.tensor([self.count(request) - 1 for request in requests], device=self.held.device)
        self.held[index, 0] = self.held[index, last]
        for request in requests:
            self.set_count(request, 1)

    def places(self, requests: list[Request]) -> torch.Tensor:
        """Indices of the requests' places on the device, `[batch]` int64; see `place`."""
        return torch.tensor([self.place(request) for request in requests], device=self.held.device)
