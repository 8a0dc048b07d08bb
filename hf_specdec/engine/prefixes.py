"""`PrefixCache`: requests whose texts begin alike share the K/V blocks of what is equal."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from ..cache.paged_cache import PagedCache
from ..ranks import Ranks
from .equal_prompts import EqualPrompts
from .prefix_keys import keys_of
from .request import PRIORITY, Request
from .weights import WeightsVersion


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..drafters import Drafting

logger = logging.get_logger(__name__)

MOST_READERS = 4
"""Most requests that are compared with one that may wait for them."""


class PrefixCache:
    """
    Lets requests take over blocks of texts that begin with the same tokens: of requests that run, and of those that
    are over, as long as nobody needs their memory. Full blocks are kept under keys: SHA-256 of the block's tokens, and
    of the key of the block before it, or of what else the K/V depend on (the adapter). Target and draft are those of
    the one engine. At least one token of a text is always read, because its logits are needed.

    Row t of an EAGLE head's K/V depends on token t + 1 as well, so a key includes as many tokens behind its block
    (`Drafting.tokens_ahead`). Such a head cannot read a text without the target's features. A request that it drafts
    for takes blocks up to the first one without its K/V; draft models read by themselves what they lack.

    Args:
        cache (`PagedCache`): the target's cache.
        drafting (`Drafting`): the draft.
        ranks (`Ranks`): the processes that run the target.
        is_wanted (`bool`): whether requests share blocks, if target and draft let them.
    """

    def __init__(self, cache: PagedCache, drafting: Drafting, ranks: Ranks, is_wanted: bool):
        self._cache, self._drafting, self._ranks, self._pool = cache, drafting, ranks, cache.pool
        self._reading: dict[Request, list[bytes]] = {}
        """Keys of requests whose prompts are being read, and are not known to be free of NaN."""
        self._readers: dict[bytes, list[Request]] = {}
        """By key, the requests that read a block or are to read it, the most urgent first, and of these the oldest."""
        self._equal = EqualPrompts(cache, drafting)
        self._version = WeightsVersion()
        self._is_to_forget = False
        self.reset_counts()
        obstacle = self._obstacle() if is_wanted else None
        if obstacle is not None:
            logger.info(f"Prefix cache: off, since {obstacle}.")
        self.is_on = is_wanted and obstacle is None
        """Whether requests share blocks."""
        if self.is_on:
            drafting.keep_block_ends()

    def reset_counts(self) -> None:
        """Sets the counts of tokens to zero."""
        self.num_queried = self.num_hit = 0

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A context in which requests share no blocks, as those of a warm-up."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def _obstacle(self) -> str | None:
        """Why requests cannot share blocks; None if they can."""
        if self._cache.state_layers:
            return "the target has recurrent or convolutional states, which are not kept at the edges of blocks"
        return None

    # ----------------------------------------------------------------------------------------------- a request's life

    def num_in_use(self, request: Request) -> int:
        """How many blocks a request that waits would share with requests that run."""
        return self._pool.num_in_use(self._found(request)) if self._shares(request) else 0

    def admit(self, request: Request) -> None:
        """Gives a request that is admitted the blocks of its text that are kept."""
        if not self._shares(request):
            return
        self._take(request)
        keys = self._keys(request)
        self._equal.admit(request)
        of_text = self._equal.key_of(request)
        keys = self._reading[request] = keys if of_text is None else [*keys, of_text]
        for key in keys:
            insort(self._readers.setdefault(key, []), request, key=PRIORITY)
        if request.length == len(request.prompt):  # it was not preempted
            self.num_queried += request.length
            self._count_hits(request, self._cache.length_of(request.table))

    def waits(self, request: Request) -> bool:
        """
        Whether a request had better wait for one that is read before it, since at least half of what that has to read
        is its own, too; not for a less urgent one, which others may keep from being read. One that has waited gets its
        blocks here.
        """
        table, before = request.table, self._cache.length_of(request.table)
        if request not in self._reading or table.is_private or before > self._num_shared(request):
            return False  # what others read after it was made private does not go with what it has
        self._take_what_was_read(request)
        length = self._cache.length_of(table)
        if request.length == len(request.prompt):
            self._count_hits(request, length - before)
        if length > self._num_shared(request):
            return False
        key = self._next_key(request)
        readers = [] if key is None else self._readers[key][:MOST_READERS]
        before_it = takewhile(lambda other: other is not request, readers)
        return any(self._is_worth_waiting_for(other, request) for other in before_it)

    def _take_what_was_read(self, request: Request) -> None:
        """Gives a request what others have read since it was admitted."""
        key, reader = self._next_key(request), self._equal.reader_for(request, self._needs_draft(request))
        if reader is not None and len(self._found(request, request.length)) == len(self._keys_before_last(request)):
            self._take(request, request.length)
            self._equal.take(request, reader)
        elif key is not None and self._pool.find(key) is not None:
            self._take(request)

    def _count_hits(self, request: Request, count: int) -> None:
        """Counts tokens of a prompt that were found here."""
        self.num_hit += count
        request.num_cached += count

    def _next_key(self, request: Request) -> bytes | None:
        """The key of the first block that a request does not share; for the one with its last token, of its text."""
        keys, number, last = self._reading[request], request.table.num_shared, request.length - 1
        if number < min(len(keys), last // self._pool.block_size):
            return keys[number]
        return self._equal.key_of(request)

    def _is_worth_waiting_for(self, other: Request, request: Request) -> bool:
        """Whether half of what another request has to read will be of use for a request."""
        if other.table.is_private or (self._needs_draft(request) and not self._is_drafted_for(other)):
            return False
        own, its = self._reading[request], self._reading[other]
        common = bisect(range(min(len(own), len(its))), False, key=lambda number: own[number] != its[number])
        left = other.length - self._cache.length_of(other.table)
        is_equal = common == len(own) and self._equal.key_of(request) is not None
        length = request.length - 1 if is_equal else common * self._pool.block_size
        gain = _num_usable(request, length, self._pool.block_size) - self._num_shared(request)
        return gain > 0 and 2 * gain >= left

    def _stop_reading(self, request: Request) -> None:
        for key in self._reading.pop(request):
            readers = self._readers[key]
            readers.remove(request)
            if not readers:
                del self._readers[key]

    def read(self, requests: Iterable[Request]) -> None:
        """Keeps the blocks of requests whose prompts have been read, if they have no errors."""
        for request in requests:
            if request in self._reading:
                self._stop_reading(request)
                self._keep(request)
                if self._may_be_read(request):
                    self._equal.read(request)

    def leave(self, request: Request) -> None:
        """Keeps the blocks of a request that is about to release them; a prompt in reading may have NaN."""
        if request in self._reading:
            self._stop_reading(request)
        elif self._shares(request):
            self._keep(request)
        self._equal.leave(request)

    def copy(self) -> None:
        """Copies what requests have got of others that is not a full block; to be called before they are read."""
        self._equal.copy()

    def _shares(self, request: Request) -> bool:
        return self.is_on and (request.inputs is None or request.inputs.content is not None)

    def _take(self, request: Request, most: int = 0) -> None:
        """Gives a request the kept blocks that its text begins with, if these are more than it has of others."""
        table, size = request.table, self._pool.block_size
        blocks = self._found(request, most)
        if len(blocks) > table.num_shared:
            self._pool.share(table, blocks)
            self._cache.note_length(table, len(blocks) * size)
            shared = table.blocks[: len(blocks)]  # the first may be older ones with the same tokens
            drafted = next((number for number, one in enumerate(shared) if one not in self._pool.drafted), len(shared))
            self._drafting.take_prefix(request, drafted * size)
            request.position_shift = self._pool.shifts.get(blocks[-1], request.position_shift)

    def _found(self, request: Request, most: int = 0) -> list[int]:
        """
        The kept blocks that a request's text begins with, in order; only those before its images, if some of these are
        behind them, and behind the first `most` tokens, which it is going to have.
        """
        blocks, needs_draft = [], self._needs_draft(request)
        for key in self._keys_before_last(request):
            block = self._pool.find(key)
            if block is None or (needs_draft and block not in self._pool.drafted):
                break
            blocks.append(block)
        size = self._pool.block_size
        if most >= request.num_read_whole:
            return blocks
        return blocks[: _num_usable(request, len(blocks) * size, size) // size]

    def _keep(self, request: Request) -> None:
        """Keeps the full blocks of a request's committed tokens."""
        table, size = request.table, self._pool.block_size
        if not self._may_be_read(request):
            return
        cached = min(self._cache.length_of(table), request.length)
        drafted = self._drafting.num_cached(request)
        for number, key in enumerate(self._keys(request)[: cached // size]):
            is_drafted = drafted is None or (number + 1) * size <= drafted
            if not _is_shift_known(request, (number + 1) * size):
                continue
            self._pool.keep(table.blocks[number], key, is_drafted, _shift_of(request, (number + 1) * size))

    def _may_be_read(self, request: Request) -> bool:
        """Whether others may have what is cached of a request; not without the positions of its own."""
        is_sound = not request.table.is_private and request.error is None
        return is_sound and request.table not in self._cache.prompt_positions

    def _needs_draft(self, request: Request) -> bool:
        return self._drafting.reads_features and self._is_drafted_for(request)

    def _is_drafted_for(self, request: Request) -> bool:
        return request.options.plan is not None

    def _num_shared(self, request: Request) -> int:
        return request.table.num_shared * self._pool.block_size

    def _keys_before_last(self, request: Request) -> list[bytes]:
        """The keys of a text's blocks that do not have its last token."""
        return self._keys(request)[: (request.length - 1) // self._pool.block_size]

    def _keys(self, request: Request) -> list[bytes]:
        """The keys of all full blocks of a request's text, as far as the tokens behind them are known."""
        return keys_of(request, self._pool.block_size, self._drafting.tokens_ahead)

    # --------------------------------------------------------------------------------------------------- what is kept

    def forget(self) -> None:
        """Keeps no block from the next step on, nor those that running requests have now. For any thread."""
        self._is_to_forget = True

    def begin_step(self, active: Iterable[Request]) -> None:
        """Does what `forget` has asked for; `active` are the requests with blocks."""
        if self._is_to_forget:
            self._is_to_forget = False
            self._pool.forget()
            for request in active:
                request.table.is_private = True

    def renew(self, models: Iterable[PreTrainedModel]) -> None:
        """Forgets all blocks if the models' weights have changed since the last call; see `WeightsVersion`."""
        if self.is_on and self._ranks.least(int(not self._version.has_changed(models))) == 0:
            self.forget()


def _num_usable(request: Request, length: int, size: int) -> int:
    """How many of the first `length` tokens of a request can be taken over: no half images."""
    return length if request.inputs is None else request.inputs.num_usable(length, size)


def _shift_of(request: Request, length: int) -> torch.Tensor | None:
    """The position shift that another request takes over with so many tokens; None if it is that of texts."""
    number = _num_images(request, length)
    if length >= request.num_read_whole:
        return request.position_shift
    return request.shifts_between[number - 1] if number else None


def _num_images(request: Request, length: int) -> int:
    """How many images of several are in the first `length` tokens of a request."""
    content = None if request.inputs is None else request.inputs.content
    return 0 if content is None else content.num_held(length)


def _is_shift_known(request: Request, length: int) -> bool:
    """Whether the position shift behind so many tokens of a request is known: it found images that others had read."""
    return length >= request.num_read_whole or _num_images(request, length) <= len(request.shifts_between)
