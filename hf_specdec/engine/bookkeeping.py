"""What steps do to requests: new tokens, counts, and what failed drafts leave in caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cache.paged_cache import PagedCache
from ..metrics import SpeculationMetrics
from ..verification import Walk
from .request import Request


if TYPE_CHECKING:
    from ..drafters import Drafting


class Bookkeeping:
    """
    Gives requests their new tokens, counts them, and takes note of what steps have left in caches.

    Args:
        cache (`PagedCache`): the target's cache.
        drafting (`Drafting`): the draft, with its cache and features.
    """

    def __init__(self, cache: PagedCache, drafting: Drafting):
        self._cache, self._drafting = cache, drafting
        self.reset()

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.metrics = SpeculationMetrics()
        """Speculation counts of all requests so far; `accepted_per_step` stays empty."""
        self.num_tokens_generated = 0

    def append(self, request: Request, tokens: list[int]) -> int:
        """Appends tokens to a request until it ends; returns how many were appended."""
        if request.is_over:
            return 0
        for number, token in enumerate(tokens, start=1):
            try:
                ends = request.append(token)
            except Exception as error:  # an error of a user's criterion fails only its request
                request.fail(error, by_its_options=True)
                ends = True
            if ends:
                return number
        return len(tokens)

    def append_last(self, requests: list[Request], walk: Walk) -> None:
        """Appends each walk's last token (others: `TargetDistribution.ends`); the paths of failed rows become None."""
        for row, request in enumerate(requests):
            path, tokens = walk.paths[row], walk.tokens[row]
            if path is not None and len(tokens) > len(path):
                self.append(request, tokens[-1:])
            if request.error is None:
                self.num_tokens_generated += len(tokens)
            else:
                walk.paths[row] = None

    def count(self, request: Request, accepted: int, drafted: int | None) -> None:
        """Counts a step of a request: its accepted draft tokens, and those that were drafted (None: no draft)."""
        request.metrics.accepted_per_step[0].append(accepted)
        if drafted is not None:
            request.metrics.add_draft(drafted, accepted)
            self.metrics.add_draft(drafted, accepted)

    def refuse_spoiled(self, spoiled: list[tuple[Request, int]]) -> None:
        """
        Removes NaN from what target and draft keep of spoiled requests, given with the number of their draft tokens,
        which count as refused.
        """
        for request, drafted in spoiled:
            self._cache.wipe_after(request.table, request.length - 1)
            self._drafting.wipe(request)
            request.draft_backoff.begin()
            for metrics in (request.metrics, self.metrics):
                metrics.add_draft(drafted, 0)

    def mark_nan(self, requests: list[Request]) -> None:
        """Takes note that K/V and features of some requests may have NaN."""
        for request in requests:
            request.table.is_private = True
            self._cache.mark_nan(request.table, but=self._cache.pool.kept)
            self._drafting.mark_nan(request)

    def mark_nan_of_failed(self, requests: list[Request]) -> None:
        """Takes note that K/V of those requests that have failed may have NaN."""
        failed = [request for request in requests if request.error is not None]
        if failed:
            self.mark_nan(failed)
