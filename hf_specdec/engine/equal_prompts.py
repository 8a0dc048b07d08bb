"""`EqualPrompts`: what prompts share that are equal as a whole, beside their full blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.paged_cache import PagedCache
from .prefix_keys import key_of_text
from .request import Request


if TYPE_CHECKING:
    from ..drafters import Drafting

LEAST_TOKENS = 16
"""Fewest tokens that are worth a copy."""


class EqualPrompts:
    """
    Copies what follows the last full block of a prompt, but for the last token, from requests that have read an equal
    prompt and still run.

    Args:
        cache (`PagedCache`): the target's cache.
        drafting (`Drafting`): the draft.
    """

    def __init__(self, cache: PagedCache, drafting: Drafting):
        self._cache, self._drafting, self._size = cache, drafting, cache.pool.block_size
        self._keys: dict[Request, bytes] = {}
        self._readers: dict[bytes, list[Request]] = {}
        """By key of the text, requests that have read it."""
        self._copies: list[tuple[int, int, int]] = []
        """Blocks to copy from, blocks to copy to, and how many slots."""

    def admit(self, request: Request) -> None:
        """Takes note of a request's text, if enough of it is behind its full blocks, and its last token is text."""
        own = request.length - 1
        if self._drafting.tokens_ahead <= 1 and own % self._size >= LEAST_TOKENS and own >= request.num_read_whole:
            self._keys[request] = key_of_text(request, self._size)

    def key_of(self, request: Request) -> bytes | None:
        """The key of a request's text; None if nothing of it is worth a copy, or can be copied."""
        return self._keys.get(request)

    def read(self, request: Request) -> None:
        """Takes note that a request has read its text without errors."""
        if request in self._keys:
            self._readers.setdefault(self._keys[request], []).append(request)

    def leave(self, request: Request) -> None:
        """Takes note that a request is about to release its blocks."""
        key = self._keys.pop(request, None)
        readers = [] if key is None else self._readers.get(key, [])
        if request in readers:
            readers.remove(request)
        if key in self._readers and not readers:
            del self._readers[key]

    def reader_for(self, request: Request, needs_draft: bool) -> Request | None:
        """A request from which another one can copy, if need be with the draft's K/V; None if there is none."""
        for other in self._readers.get(self._keys.get(request, b""), []):
            drafted = self._drafting.num_cached(other) if needs_draft else None
            if not other.table.is_private and (drafted is None or drafted >= request.length - 1):
                return other
        return None

    def take(self, request: Request, other: Request) -> None:
        """Lets a request that has all full blocks of its text have what is behind them in another's."""
        number, length, drafting = request.table.num_shared, request.length - 1, self._drafting
        first = number * self._size
        self._copies.append((other.table.blocks[number], request.table.blocks[number], length - first))
        self._cache.note_length(request.table, length)
        drafted = drafting.num_cached(other)
        if drafted is not None and drafting.num_cached(request) == first:
            drafting.take_prefix(request, max(min(drafted, length), first))
        for cache in self._caches:
            cache.clean([request.table])  # what is copied must not be cleaned later
        request.position_shift = other.position_shift

    @property
    def _caches(self) -> list[PagedCache]:
        return [cache for cache in (self._cache, self._drafting.cache) if cache is not None]

    def copy(self) -> None:
        """Copies what `take` has promised."""
        if not self._copies:
            return
        sources, targets, counts = torch.tensor(self._copies, device="cpu").unbind(dim=1)
        firsts = counts.cumsum(dim=0) - counts
        sources, targets, firsts = (values.repeat_interleave(counts) for values in (sources, targets, firsts))
        offsets = torch.arange(len(firsts), device="cpu") - firsts
        for cache in self._caches:
            cache.move_slots(sources, offsets, targets, offsets)
        self._copies = []
