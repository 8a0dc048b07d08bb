"""Drafting with a model that has a K/V cache: the cache stays, and drafters of other calls may take it over."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from transformers import PreTrainedModel

from ...cache.paged_cache import PagedCache
from .base import Drafting


class CachedDrafting(Drafting):
    """Drafts with the one model of a drafter, whose K/V are in `_cache`."""

    _cache: PagedCache

    @abstractmethod
    def _begin(self, drafter: Any) -> None:
        """Prepares a drafter for forwards into the cache."""

    def attach(self, drafter: Any) -> None:
        self.drafter: Any = drafter
        self._cache.serve(*drafter.models)
        self._begin(drafter)

    def detach(self) -> None:
        self.drafter = None
        self._cache.serve(None)

    @property
    def cache(self) -> PagedCache:
        return self._cache

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models
