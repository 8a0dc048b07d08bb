"""Which requests run: admission by memory, prompts in chunks, and who has to wait when blocks run out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from transformers.generation.continuous_batching.requests import RequestStatus

from .blocks import BlockPool
from .paged_cache import PagedCache
from .request import Request


class Scheduler:
    """
    First come, first served. A request is admitted when there are blocks for its text so far; later it takes a block
    at a time. When none is left, the youngest request gives all of its own back and waits again, first in the queue:
    its text is kept, only its K/V are computed anew. (Blocks for all that a request may ever write would seldom be
    used: texts end early.) The oldest always goes on, so that all do in the end.

    Args:
        pool (`BlockPool`): the blocks.
        cache (`PagedCache`): the target's, which says how much of a text has been forwarded.
        max_requests (`int`): most requests that run at once.
        chunk_size (`int`): most prompt tokens of a step.
        on_release (`Callable`): told which request gives its blocks back.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PagedCache,
        max_requests: int,
        chunk_size: int,
        on_release: Callable[[Request], None],
    ):
        self.pool, self.cache = pool, cache
        self.max_requests, self.chunk_size, self.on_release = max_requests, chunk_size, on_release
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        """Those with blocks, the oldest first."""
        self.num_preemptions = 0

    @property
    def running(self) -> list[Request]:
        """Requests whose text is in the cache, but for the root."""
        return [request for request in self.active if request.status == RequestStatus.DECODING]

    @property
    def has_work(self) -> bool:
        """Whether any request is not over."""
        return bool(self.waiting or self.active)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Gives the first of the waiting requests their blocks, as far as these go."""
        while self.waiting and len(self.active) < self.max_requests:
            request = self.waiting[0]
            # One block more for each that runs already: else it would have to wait again soon.
            spare = 0 if not self.active else len(self.active) + 1
            if self.pool.num_free < self.pool.blocks_for(request.length) + spare:
                return
            self.pool.reserve(request.table, request.length)
            self.active.append(self.waiting.popleft())
            request.status = RequestStatus.PREFILLING

    def next_chunk(self) -> tuple[list[Request], list[int]]:
        """Requests whose texts are to be forwarded next, oldest first, and how many tokens of each."""
        requests: list[Request] = []
        counts: list[int] = []
        for request in self.active:
            if request.status != RequestStatus.PREFILLING:
                continue
            count = min(request.length - self.cache.length_of(request.table), self.chunk_size)
            # All rows are padded to the longest.
            if (len(requests) + 1) * max([count, *counts]) > self.chunk_size:
                break
            requests.append(request)
            counts.append(count)
        return requests, counts

    def read(self, requests: list[Request]) -> list[int]:
        """Notes that chunks have been forwarded. Returns which of these rows have been read to their end."""
        ended = [row for row, r in enumerate(requests) if self.cache.length_of(r.table) == r.length]
        for row in ended:
            requests[row].status = RequestStatus.DECODING
        return ended

    def make_room(self, request: Request) -> None:
        """Gives a running request blocks for its root; the youngest lose theirs for it, it may be itself."""
        if request not in self.active:
            return  # it has lost its blocks to another in this very step
        if self.pool.reserve(request.table, request.length):
            return
        for other in self.active:
            self.pool.release(other.table, other.length)  # what was for their trees
        while request in self.active and not self.pool.reserve(request.table, request.length):
            self._preempt(self.active[-1])

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.remove(request)
        request.status = RequestStatus.PENDING
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Takes the blocks of a request that is over, or has to wait again."""
        if request in self.active:
            self.active.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.on_release(request)
        self.cache.forget(request.table)
        self.pool.release(request.table)
