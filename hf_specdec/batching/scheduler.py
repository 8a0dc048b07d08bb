"""Which requests run: admission by memory, prompts in chunks, and who has to wait when blocks run out."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers.generation.continuous_batching.requests import RequestStatus

from ..prompts import next_piece, padded_piece
from .blocks import BlockPool
from .paged_cache import PagedCache
from .request import Request


MOST_ROWS = 16
"""Of a piece of some width: the logits of as many tokens of each are computed."""


@dataclass(frozen=True)
class Chunk:
    """
    Parts of texts that are forwarded together.

    Args:
        requests (`list[Request]`): whose they are, oldest first.
        counts (`list[int]`): how many tokens of each.
        width (`int`, *optional*): tokens of each that are forwarded, for which there may be a graph. None: all rows
            are padded to the longest.
    """

    requests: list[Request]
    counts: list[int]
    width: int | None = None

    @property
    def num_tokens(self) -> int:
        """Forwarded in all."""
        return len(self.requests) * (self.width or max(self.counts))


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
        widths (`Callable`, *optional*): the numbers of tokens, rising, for which there are graphs of forwards of
            prompts; none if there are no graphs.
        busy_at (`int`, *optional*): prompt tokens which the device takes longer to forward than the host to launch it:
            so many go without a graph.
        pads (`Callable`, *optional*): whether the pieces of a request may end in padding.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PagedCache,
        max_requests: int,
        chunk_size: int,
        on_release: Callable[[Request], None],
        widths: Callable[[], tuple[int, ...]] = tuple,
        busy_at: int = sys.maxsize,
        pads: Callable[[Request], bool] = lambda request: False,
    ):
        self.pool, self.cache = pool, cache
        self.max_requests, self.chunk_size, self.on_release = max_requests, chunk_size, on_release
        self._widths, self.busy_at, self._pads = widths, busy_at, pads
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

    def chunks(self) -> Iterator[Chunk]:
        """
        What of the texts is to be forwarded in a step, each chunk after the one before has been read: one that is
        padded to the longest, or several of the widths for which there are graphs.
        """
        left = self.chunk_size
        widths = [width for width in self._widths() if width <= self.chunk_size and width < self.busy_at]
        if not widths or min(sum(self._num_unread(one) for one in self._unread), left) >= self.busy_at:
            chunk = self._padded_chunk(self._unread, left)
            if chunk is not None:
                yield chunk
            return
        while (chunk := self._piece(widths, left)) is not None:
            left -= chunk.num_tokens
            yield chunk

    @property
    def _unread(self) -> list[Request]:
        return [request for request in self.active if request.status == RequestStatus.PREFILLING]

    def _num_unread(self, request: Request) -> int:
        return request.length - self.cache.length_of(request.table)

    def _padded_chunk(self, unread: list[Request], most: int) -> Chunk | None:
        """As many of these requests, oldest first, as make so many tokens."""
        requests: list[Request] = []
        counts: list[int] = []
        for request in unread:
            count = min(self._num_unread(request), self.chunk_size)
            if (len(requests) + 1) * max([count, *counts]) > most:
                break
            requests.append(request)
            counts.append(count)
        return Chunk(requests, counts) if requests else None

    def _piece(self, widths: list[int], most: int) -> Chunk | None:
        """
        The next tokens of the oldest request, and of others with as many. Their number is a power of two, so that
        there are few sizes and no rows that are nobody's.
        """
        most = min(most, self.busy_at - 1)
        widths = [width for width in widths if width <= most]
        unread = self._unread if widths else []
        pieces = [self._next_piece(request, widths) for request in unread]
        same = [
            (request, piece[1])
            for request, piece in zip(unread, pieces, strict=True)
            if piece[0] is not None and (piece[0], piece[2]) == (pieces[0][0], pieces[0][2])
        ]
        if not same:  # too short for any width, or nothing
            short = [request for request, (width, _, _) in zip(unread, pieces, strict=True) if width is None]
            return self._padded_chunk(short[: 1 << (len(short).bit_length() - 1)] if short else [], most)
        width = pieces[0][0]
        assert width is not None
        number = min(len(same), most // width, MOST_ROWS)
        requests, counts = zip(*same[: 1 << (number.bit_length() - 1)], strict=True)
        return Chunk(list(requests), list(counts), width)

    def _next_piece(self, request: Request, widths: list[int]) -> tuple[int | None, int, bool]:
        """Width and new tokens of a request's next piece, and whether it may end in padding."""
        unread, pads = self._num_unread(request), self._pads(request)
        return (*(padded_piece(unread, widths) if pads else next_piece(request.length, unread, widths)), pads)

    def read(self, requests: list[Request]) -> list[int]:
        """Notes that chunks have been forwarded. Returns which of these rows have been read to their end."""
        ended = [row for row, r in enumerate(requests) if self.cache.length_of(r.table) == r.length]
        for row in ended:
            requests[row].status = RequestStatus.DECODING
        return ended

    def make_room(self, request: Request) -> None:
        """Gives a running request blocks for its root; the youngest lose theirs for it, it may be itself."""
        if self.pool.blocks_for(request.length) <= len(request.table.blocks):
            return
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
