"""`PartOfCache`: a layer that knows the cache it is part of."""

from __future__ import annotations

import weakref
from abc import ABC
from typing import TYPE_CHECKING, Generic, TypeVar


if TYPE_CHECKING:
    from .tree_cache import TreeCache

CacheT = TypeVar("CacheT", bound="TreeCache")


class PartOfCache(Generic[CacheT], ABC):
    """A layer of a cache, without a reference cycle: K/V must be freed with the call."""

    _cache: weakref.ref[CacheT]

    def join(self, cache: CacheT) -> None:
        """Makes the layer part of a cache."""
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> CacheT:
        """The cache that the layer is part of."""
        cache = self._cache()
        if cache is None:
            raise ReferenceError("The cache of this layer is gone. Keep it as long as its layers are used.")
        return cache
