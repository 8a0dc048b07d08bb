"""Drafting with a draft model: all requests of a step share its forwards."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ...cache.blocks import BlockPool
from ...cache.paged_cache import PagedCache
from ...cache.sizes import num_cached_layers
from ...drafters import DraftModelDrafter, DraftRequest
from ...forwards.chunks import LONGEST_FORWARD
from ...forwards.node_inputs import causal_chain
from ...graphs import GraphPool
from ...graphs.paged import PagedGraphs
from ...models.structure import execution_device
from ...trees import DraftTree
from ..captured.drafts import CapturedDraftModel
from ..request import Request
from ..step_rows import StepRows
from .cached import CachedDrafting
from .forwards import MOST_UNREAD_TOKENS, can_be_captured


MOST_TOKENS = 8192
"""Most tokens of all rows, padding included, that a draft model forwards at once when it catches up."""


class DraftModelDrafting(CachedDrafting):
    """Drafts with a draft model. Tokens that are not in its cache yet are forwarded when a tree is proposed."""

    def __init__(
        self,
        drafter: DraftModelDrafter,
        pool: BlockPool,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        graphs = PagedGraphs.of(drafter.model, cuda_graphs, graph_pool)
        self._cache = PagedCache(num_cached_layers(drafter.model), pool, execution_device(drafter.model), graphs)
        self.attach(drafter)

    def _begin(self, drafter: Any) -> None:
        drafter.begin(self._cache, None, torch.zeros(1, dtype=torch.long, device=self._cache.device))

    def propose(self, requests: list[Request], asked: DraftRequest) -> DraftTree | None:
        self.drafter.ask(asked)
        self.catch_up(requests, MOST_UNREAD_TOKENS)
        self.cache.seat([request.table for request in requests])
        starts = [min(seen, request.length - 1) for seen, request in zip(self.cache.lengths, requests, strict=True)]
        return self.drafter.propose(StepRows(requests, self.drafter.device, starts))

    def _read(self, requests: list[Request]) -> None:
        """Forwards all tokens of some requests that the draft has not read, except the roots."""
        device, forward = self.drafter.device, self.drafter.forward
        while left := [request for request in requests if self.cache.length_of(request.table) < request.length - 1]:
            own = _fitting(left, [request.length - 1 - self.cache.length_of(request.table) for request in left])
            starts = [self.cache.length_of(request.table) for request in own]
            ends = [
                min(request.length - 1, start + LONGEST_FORWARD) for request, start in zip(own, starts, strict=True)
            ]
            most = self._width(max(end - start for start, end in zip(starts, ends, strict=True)))
            parts = [request.tokens[start:end] for request, start, end in zip(own, starts, ends, strict=True)]
            # Rows with fewer tokens repeat their last one after it, at its position.
            tokens = torch.tensor([part + part[-1:] * (most - len(part)) for part in parts], device=device)
            last = torch.tensor([len(part) - 1 for part in parts], device=device)[:, None]
            depths = torch.arange(most, device=device).minimum(last)
            self.cache.seat([request.table for request in own])
            forward(tokens, *causal_chain(most, device), position_depths=depths, logits_to_keep=1)
            self.cache.set_lengths(ends)

    def _width(self, most: int) -> int:
        """Width of a forward of `most` tokens: the next captured chunk width, or `most` without one."""
        graphs = self.cache.graphs
        widths = graphs.prompt_widths if graphs is not None and graphs.works else ()
        return min((width for width in widths if width >= most), default=most)

    def forget(self, request: Request) -> None:
        self.cache.forget(request.table)

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    captured_draft = CapturedDraftModel

    @property
    def can_be_captured(self) -> bool:
        return type(self.drafter) is DraftModelDrafter and can_be_captured(self.drafter.forward)

    def room(self, request: Request) -> int:
        most = self.drafter.max_positions
        return request.room if most is None else min(request.room, most - request.length)

    def catch_up(self, requests: list[Request], most: int) -> None:
        self._read([request for request in requests if request.length - self.cache.length_of(request.table) > most])

    def lags(self, requests: list[Request]) -> list[int]:
        return [request.length - min(self.cache.length_of(request.table), request.length - 1) for request in requests]

    def note_proposed(self, requests: list[Request]) -> None:
        for request in requests:
            self.cache.note_length(request.table, request.length)


def _fitting(requests: list[Request], counts: list[int]) -> list[Request]:
    """The first requests, of `counts` tokens each, that padded to the longest fit into a forward of `MOST_TOKENS`."""
    longest = 0
    for number, count in enumerate(counts):
        longest = max(longest, min(count, LONGEST_FORWARD))
        if number > 0 and (number + 1) * longest > MOST_TOKENS:
            return requests[:number]
    return requests
