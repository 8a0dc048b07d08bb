"""Scheduling: admission by memory, chunked prefill, and preemption when blocks run out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from transformers.generation.continuous_batching.requests import RequestStatus

from ..cache.blocks import BlockPool
from ..cache.paged_cache import PagedCache
from ..forwards.chunks import next_chunk, padded_chunk
from .prefixes import PrefixCache
from .request import PRIORITY, Request


MOST_ROWS = 16
"""Most rows of a chunk with a width: a captured chunk computes as many logits per row as there are rows."""


@dataclass(frozen=True)
class Chunk:
    """
    A prefill chunk: parts of the texts of some requests, forwarded together.

    Args:
        requests (`list[Request]`): the rows, oldest request first.
        counts (`list[int]`): number of new tokens of each row.
        width (`int`, *optional*): number of forwarded tokens of each row, for which there may be a CUDA graph. None:
            all rows are padded to the longest.
        is_whole (`bool`, *optional*, defaults to `False`): whether it is the whole prompts of the requests with the
            same `PromptInputs`, or of one what is left up to its images at least, which the model reads as in plain
            `generate`.
    """

    requests: list[Request]
    counts: list[int]
    width: int | None = None
    is_whole: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, padding included."""
        return len(self.requests) * (self.width or max(self.counts))


class Scheduler:
    """
    Schedules requests by priority, and those of one priority first come, first served. A request is admitted when
    there are blocks for its text so far, those included that others have only for their trees; later it takes one
    block at a time. When no block is left, the last of these is preempted: it releases all of its blocks and waits
    again, first among its like. Its text is kept, and only its K/V are computed anew. (Blocks reserved for the longest
    possible text would seldom be used, because texts end early.) The first is never preempted for another, so that
    requests of one priority finish in the end.

    Args:
        pool (`BlockPool`): the K/V blocks.
        cache (`PagedCache`): the target's cache, which knows how much of a text has been forwarded.
        prefixes (`PrefixCache`): blocks of texts that begin alike.
        max_requests (`int`): most requests that run at once.
        chunk_size (`int`): most prompt tokens per step.
        busy_at (`int`): number of prompt tokens whose forward takes the device longer than its launches take the host;
            so many tokens are forwarded without a graph.
        widths (`Callable`): returns the chunk widths in tokens, rising, for which there are CUDA graphs; empty without
            graphs.
        pads (`Callable`): returns whether the chunks of a request may end in padding.
        on_release (`Callable`): called with a request that releases its blocks.
        on_nan (`Callable`): called with requests that end before their prefill does, whose K/V may have NaN.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PagedCache,
        prefixes: PrefixCache,
        *,
        max_requests: int,
        chunk_size: int,
        busy_at: int,
        widths: Callable[[], tuple[int, ...]],
        pads: Callable[[Request], bool],
        on_release: Callable[[Request], None],
        on_nan: Callable[[list[Request]], None],
    ):
        self.pool, self.cache, self.prefixes = pool, cache, prefixes
        self.max_requests, self.chunk_size, self.busy_at = max_requests, chunk_size, busy_at
        self._widths, self._pads, self._on_release, self._on_nan = widths, pads, on_release, on_nan
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        """Requests that have blocks, the oldest first."""
        self._prefilling: set[Request] = set()
        """Requests in `active` of whose prompts the last token has not been read."""
        self.num_preemptions = 0

    @property
    def decoding(self) -> list[Request]:
        """Requests whose prefill has ended: all of their text but the root is in the cache."""
        return [request for request in self.active if request.status == RequestStatus.DECODING]

    @property
    def has_work(self) -> bool:
        """Whether any request is not over."""
        return bool(self.waiting or self.active)

    def add(self, request: Request) -> None:
        """Puts a request into the queue: behind all that are not less urgent."""
        waiting, place = self.waiting, len(self.waiting)
        while place and waiting[place - 1].priority > request.priority:
            place -= 1
        waiting.insert(place, request)

    def admit(self, number: int | None = None) -> list[Request]:
        """
        Admits waiting requests in order, and returns them: as many as there are places and blocks for, with some to
        grow into, or `number` of them, where the caller knows that all their blocks are free.
        """
        first = len(self.active)
        for _ in range(self.num_admissible(self.waiting) if number is None else number):
            request = self.waiting.popleft()
            self.prefixes.admit(request)
            if not self.pool.reserve(request.table, request.length):
                self._release_trees()
                self.pool.reserve(request.table, request.length)
            self.active.append(request)
            request.status = RequestStatus.PREFILLING
            self._prefilling.add(request)
        return self.active[first:]

    def num_admissible(self, requests: Collection[Request]) -> int:
        """Number of these requests, in their order, for which there are places and blocks at present."""
        num_active, number = len(self.active), 0
        if not requests or num_active >= self.max_requests:
            return 0  # as in most steps, which ask before they run again
        of_trees = (len(one.table.blocks) - self.pool.blocks_for(one.length) for one in self.active)
        free = self.pool.num_free + sum(of_trees)
        for request in requests:
            # One more block for each active request and this one: else it would soon be preempted.
            reserve = num_active + 1 if num_active else 0
            free -= self.pool.blocks_for(request.length) - self.prefixes.num_in_use(request)
            if num_active >= self.max_requests or free < reserve:
                break
            num_active, number = num_active + 1, number + 1
        return number

    def _release_trees(self) -> None:
        """Takes back the blocks that are reserved for trees."""
        for request in self.active:
            self.pool.release(request.table, request.length)

    def chunks(self) -> Iterator[Chunk]:
        """
        Yields the prefill chunks of a step: prompts with inputs beside their tokens, each whole; and of the others one
        that is padded to the longest row, or several with widths for which there are CUDA graphs. Each chunk must be
        forwarded before the next is asked for.
        """
        left = self.chunk_size
        if not self._prefilling:
            return  # as in most steps
        for request in list(self.active):
            if request.inputs is None or self.prefixes.waits(request) or not self._is_read_whole(request):
                continue  # the last with another
            together = [one for one in self.active if one.inputs is request.inputs]
            counts = [self._num_whole(one) for one in together]
            whole = Chunk(together, counts, is_whole=True)
            # One that is longer than a step may read is read all the same.
            if whole.num_tokens <= left or left == self.chunk_size:
                self.prefixes.copy()
                left -= whole.num_tokens
                yield whole
        widths = [width for width in self._widths() if width <= self.chunk_size and width < self.busy_at]
        if not widths or min(sum(self._num_unread(one) for one in self._unread), left) >= self.busy_at:
            chunk = self._padded_chunk(self._unread, left)
            if chunk is not None:
                yield chunk
            return
        while (chunk := self._chunk_of_a_width(widths, left)) is not None:
            left -= chunk.num_tokens
            yield chunk

    @property
    def _unread(self) -> list[Request]:
        """
        Requests with tokens to read in chunks: all that are unread, or those before and after the images of a prompt.
        Not those that wait until an older one has read tokens that both have.
        """
        unread = sorted((one for one in self.active if one.status == RequestStatus.PREFILLING), key=PRIORITY)
        unread = [request for request in unread if not self._is_read_whole(request)]
        unread = [request for request in unread if not self.prefixes.waits(request)]
        self.prefixes.copy()
        return unread

    def _num_whole(self, request: Request) -> int:
        """Tokens of a request that are read in one forward with its images."""
        length = self.cache.length_of(request.table)
        assert request.inputs is not None
        return request.inputs.end_of_whole(len(request.prompt), length, self.chunk_size) - length

    def _is_read_whole(self, request: Request) -> bool:
        """Whether the next that is read of a request has its images, or is all of its prompt; see `PromptInputs`."""
        is_unread = request.status == RequestStatus.PREFILLING
        return is_unread and request.num_lead <= self.cache.length_of(request.table) < request.num_read_whole

    def _num_unread(self, request: Request) -> int:
        """Tokens that are to be read of a request in chunks: up to its images, or behind them."""
        length = self.cache.length_of(request.table)
        return (request.num_lead if length < request.num_lead else request.length) - length

    def _padded_chunk(self, unread: list[Request], most: int) -> Chunk | None:
        """A chunk of the first requests of `unread` that pad to at most `most` tokens; None if not even one fits."""
        requests: list[Request] = []
        counts: list[int] = []
        for request in unread:
            count = min(self._num_unread(request), self.chunk_size)
            if (len(requests) + 1) * max([count, *counts]) > most:
                break
            requests.append(request)
            counts.append(count)
        return Chunk(requests, counts) if requests else None

    def _chunk_of_a_width(self, widths: list[int], most: int) -> Chunk | None:
        """
        The next chunk with a width: tokens of the oldest request, and of other requests with a chunk of that width.
        The number of rows is a power of two, so that there are few graph sizes and no padding rows. Requests too short
        for any width are in a padded chunk. None if nothing is left to read.
        """
        most = min(most, self.busy_at - 1)
        widths = [width for width in widths if width <= most]
        unread = self._unread if widths else []
        found = [self._next_chunk(request, widths) for request in unread]
        same = [
            (request, count)
            for request, (width, count, pads) in zip(unread, found, strict=True)
            if width is not None and (width, pads) == (found[0][0], found[0][2])
        ]
        if not same:  # the oldest is too short for any width, or nothing is unread
            short = [request for request, (width, _, _) in zip(unread, found, strict=True) if width is None]
            return self._padded_chunk(short[: 1 << (len(short).bit_length() - 1)] if short else [], most)
        width = found[0][0]
        assert width is not None
        number = min(len(same), most // width, MOST_ROWS)
        requests, counts = zip(*same[: 1 << (number.bit_length() - 1)], strict=True)
        return Chunk(list(requests), list(counts), width)

    def _next_chunk(self, request: Request, widths: list[int]) -> tuple[int | None, int, bool]:
        """Width of a request's next chunk, its number of new tokens, and whether it may end in padding."""
        unread, pads = self._num_unread(request), self._pads(request)
        if request.inputs is not None:  # tokens of the prompt, which a chunk of a width may repeat, are not all of it
            return None, unread, False
        own = request.length - request.table.num_shared * self.pool.block_size  # what may be read again
        return (*(padded_chunk(unread, widths) if pads else next_chunk(own, unread, widths)), pads)

    def note_read(self, requests: list[Request]) -> list[int]:
        """Takes note that a chunk of `requests` was forwarded. Returns the rows whose prefill has ended."""
        ended = [row for row, r in enumerate(requests) if self.cache.length_of(r.table) == r.length]
        for row in ended:
            requests[row].status = RequestStatus.DECODING
            self._prefilling.discard(requests[row])
        return ended

    def make_room(self, request: Request) -> None:
        """Gives a running request a block for its root, preempting the last requests, possibly itself."""
        if self.pool.blocks_for(request.length) <= len(request.table.blocks):
            return
        if request not in self.active:
            return  # preempted in this very step
        if self.pool.reserve(request.table, request.length):
            return
        self._release_trees()
        while request in self.active and not self.pool.reserve(request.table, request.length):
            self._preempt(max(reversed(self.active), key=PRIORITY))  # the youngest of the least urgent

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.remove(request)
        request.status, request.position_shift = RequestStatus.PENDING, None  # what it has before its images is text
        waiting, place = self.waiting, 0
        while place < len(waiting) and waiting[place].priority < request.priority:
            place += 1
        waiting.insert(place, request)

    def remove(self, request: Request) -> None:
        """Removes a request that is over or preempted, and releases its blocks."""
        if request in self.active:
            self.active.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request in self._prefilling:  # nobody has looked for NaN yet
            self._prefilling.remove(request)
            self._on_nan([request])
        self.prefixes.leave(request)
        self._on_release(request)
        self.cache.forget(request.table)
        self.pool.release(request.table)
