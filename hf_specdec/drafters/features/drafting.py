"""`FeatureDrafting`: a head that reads the target's features, for requests in flight."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

import torch

from ...cache.blocks import BlockPool
from ...cache.paged_cache import PagedCache
from ...cache.pending_features import PendingFeatures
from ...forwards.chunks import LONGEST_FORWARD
from ...graphs import GraphPool
from ...graphs.paged import PagedGraphs
from ...models.structure import execution_device
from ...sequences import StepRows
from ...trees import DraftTree, DynamicTree, TokenTree
from ..drafting import MOST_UNREAD_TOKENS, CachedDrafting, nodes_of
from ..request import DraftRequest
from .captured import CapturedFeatures
from .drafter import FeatureDrafter


if TYPE_CHECKING:
    from ...engine.request import Request
    from ...forwards.target import TreeTarget


class FeatureDrafting(CachedDrafting):
    """
    Drafts with a head that reads the target's features: each prompt chunk right after the target; those of generated
    tokens wait until a tree is proposed, or until there are too many of them.
    """

    drafter: FeatureDrafter

    def __init__(
        self,
        drafter: FeatureDrafter,
        pool: BlockPool,
        max_requests: int,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        self._max_requests = max_requests
        device = execution_device(drafter.head)
        num_layers = drafter.head.config.text_config.num_hidden_layers
        self.cache = PagedCache(num_layers, pool, device, PagedGraphs.of(drafter.head, cuda_graphs, graph_pool))
        self.attach(drafter)

    def _begin(self) -> None:
        self.drafter.begin(self.cache, None, torch.zeros(1, dtype=torch.long, device=self.cache.device), 0)

    reads_features = True

    @property
    def tokens_ahead(self) -> int:  # type: ignore[override]
        return self.drafter.tokens_ahead

    def refresh(self) -> None:
        self.drafter.refresh()

    def watching(self, target: TreeTarget) -> AbstractContextManager[object]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return self._num_pending(request) > 0

    def observe_prompts(self, requests: list[Request], kept: list[list[int]]) -> None:
        features, own, kept = self._take(requests, kept)
        if not own:
            return
        assert self.features is not None
        counts = [len(nodes) for nodes in kept]
        ends = [self.cache.length_of(request.table) + count for request, count in zip(own, counts, strict=True)]
        # The last feature of a prompt waits for the next token, with which it is read.
        begin = [row for row, (request, end) in enumerate(zip(own, ends, strict=True)) if end == request.length]
        self._read(own, features, kept, ends)
        if begin:
            last = torch.tensor([kept[row][-1] for row in begin], device=features.device)
            rows = torch.tensor(begin, device=features.device)
            self.features.put([own[row] for row in begin], features[rows, last][:, None], [1] * len(begin))

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        assert features is None  # captured steps write features to the store themselves
        taken, own, kept = self._take(requests, kept)
        if not own:
            return
        store = self.features
        assert store is not None  # `_take` has made it
        nodes, size = nodes_of(taken, kept), store.capacity // 2
        for start in range(0, nodes.shape[1], size):
            rows = [row for row, kept_nodes in enumerate(kept) if len(kept_nodes) > start]
            counts = [min(len(kept[row]) - start, size) for row in rows]
            these = [own[row] for row in rows]
            self.make_room(these, max(counts))
            store.put(these, nodes[rows, start : start + size], counts)

    def _take(
        self, requests: list[Request], kept: list[list[int]]
    ) -> tuple[torch.Tensor, list[Request], list[list[int]]]:
        """
        Takes the recorded features of the target for the requests that speculate and keep nodes: the features `[rows,
        nodes, size]`, these requests, and their kept nodes.
        """
        features = self.drafter.take_features()
        self.make_store()
        rows = [
            row
            for row, (request, nodes) in enumerate(zip(requests, kept, strict=True))
            if nodes and request.options.plan is not None
        ]
        if len(rows) < len(requests):
            features = features[rows]
        return features, [requests[row] for row in rows], [kept[row] for row in rows]

    def make_store(self) -> None:
        if self.features is None:
            most = min(self._max_requests, self.cache.pool.num_blocks)  # each has a block at least
            size, dtype = self.drafter.head.config.feature_size, self.drafter.head.dtype
            capacity = PendingFeatures.capacity_for(self._max_requests, size * dtype.itemsize)
            self.features = PendingFeatures(most, size, self.drafter.device, dtype, capacity)

    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        self.drafter.ask(draft_request)
        self.catch_up(requests, MOST_UNREAD_TOKENS)
        counts = self.lags(requests)
        assert self.features is not None
        self.cache.seat([request.table for request in requests])
        rows = StepRows(requests, self.drafter.device, self.cache.lengths)
        draft = self.drafter.propose_from(rows, self.features.of(requests, max(counts)), counts)
        if draft is not None:
            for request in requests:
                self.features.set_count(request, 0)
        return draft

    def _num_pending(self, request: Request) -> int:
        return 0 if self.features is None else self.features.count(request)

    def _read_pending(self, requests: list[Request]) -> None:
        """Lets the head read all pending features of some requests but the last, which stays for the next tree."""
        if not requests:
            return
        assert self.features is not None
        counts = [self._num_pending(request) for request in requests]
        ends = [self.cache.length_of(request.table) + count for request, count in zip(requests, counts, strict=True)]
        features = self.features.of(requests, self.features.width_for(max(counts)))
        self._read(requests, features, [list(range(count)) for count in counts], [end - 1 for end in ends])
        self.features.keep_last(requests)

    def _read(self, requests: list[Request], features: torch.Tensor, nodes: list[list[int]], ends: list[int]) -> None:
        """
        Forwards features (`[batch, width, size]`) through the head, each with the token after it. `nodes` are the
        consecutive new nodes of each request. Afterwards the head's cache has `ends` rows of a request, but at most
        one fewer than its text has tokens, because no token is after the last one.
        """
        width, device = features.shape[1], self.drafter.device
        starts = [self.cache.length_of(request.table) - new[0] for request, new in zip(requests, nodes, strict=True)]
        last = torch.tensor([new[-1] for new in nodes], device=device)[:, None]
        depths = torch.arange(width, device=device).minimum(last)
        parts = [
            request.tokens[start + 1 : start + 1 + width] for request, start in zip(requests, starts, strict=True)
        ]
        tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=device)
        self.cache.seat([request.table for request in requests])
        ends = [min(end, request.length - 1) for end, request in zip(ends, requests, strict=True)]
        for first in range(0, width, LONGEST_FORWARD):
            self.cache.set_lengths([start + first for start in starts])
            piece = slice(first, first + LONGEST_FORWARD)
            counts = [end - start - first for start, end in zip(starts, ends, strict=True)]
            self._read_rows(requests, tokens[:, piece], features[:, piece], depths[:, piece] - first, counts)
        self.cache.set_lengths(ends)

    def _read_rows(
        self,
        requests: list[Request],
        tokens: torch.Tensor,
        features: torch.Tensor,
        depths: torch.Tensor,
        counts: list[int],
    ) -> None:
        """Lets the head read rows after the cache, of which the first `counts` of every request stay there."""
        self.drafter.cache_features(tokens, features, depths)

    def num_slots(self, tree: TokenTree | DynamicTree) -> int:
        return self.drafter.num_slots(tree)

    def forget(self, request: Request) -> None:
        if self.features is not None:
            self.features.forget(request)
        self.cache.forget(request.table)

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    captured_draft: type[CapturedFeatures] = CapturedFeatures
    most_levels = PendingFeatures.LEAST_CAPACITY - 2  # beside a waiting feature, the root's and one per level

    @property
    def has_confidence(self) -> bool:  # type: ignore[override]
        return self.drafter.has_confidence

    def catch_up(self, requests: list[Request], most: int) -> None:
        self._read_pending([request for request in requests if self._num_pending(request) > most])

    def lags(self, requests: list[Request]) -> list[int]:
        return [self._num_pending(request) for request in requests]

    def make_room(self, requests: list[Request], count: int) -> None:
        store = self.features
        if store is not None and max(store.counts(requests), default=0) + count > store.capacity:
            most = min(store.capacity // 2, store.capacity - count)  # rows that will soon be full catch up as well
            self._read_pending([request for request in requests if store.count(request) > most])

    def note_features(self, requests: list[Request], counts: list[int]) -> None:
        assert self.features is not None
        self.features.add(requests, counts)  # requests that do not speculate have no place in it

    def note_read(self, requests: list[Request], ends: list[int]) -> None:
        for request, end in zip(requests, ends, strict=True):
            if request.options.plan is not None:
                self.cache.note_length(request.table, min(end, request.length - 1))
                if end == request.length and self.features is not None:
                    self.features.set_count(request, 1)

    def note_proposed(self, requests: list[Request]) -> None:
        assert self.features is not None
        for request in requests:
            self.features.set_count(request, 0)
            self.cache.note_length(request.table, request.length - 1)
