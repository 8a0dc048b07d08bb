"""Drafting with models for requests in flight: all requests of a step share the draft's forwards."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter, DraftModelDrafter, DraftRequest, EagleDrafter, MedusaDrafter
from ..forwards.models import execution_device
from ..forwards.node_inputs import causal_chain
from ..forwards.tree_forward import TreeForward
from ..graphs import GraphPool
from ..kernels import DTYPES
from ..trees import DraftTree
from .blocks import BlockPool
from .device_steps.drafts import HeadPart, ModelPart
from .drafting import Drafting, OneByOneDrafting
from .graphs import PagedGraphs
from .paged_cache import PagedCache
from .request import Request
from .step_rows import StepRows
from .waiting_features import WaitingFeatures


if TYPE_CHECKING:
    from .target import InFlightTarget

LONGEST_FORWARD = 512
"""Most tokens per row that a draft forwards at once when it catches up."""
MOST_TOKENS = 8192
"""Most tokens of all rows, padding included, that a draft model forwards at once when it catches up."""
MOST_UNREAD_TOKENS = 16
"""Most unread tokens of a row that are read in the forward that drafts; rows further behind catch up before it."""


def drafting_of(
    drafter: Drafter,
    target: PreTrainedModel,
    pool: BlockPool,
    max_requests: int,
    cuda_graphs: bool | Literal["auto"] = False,
    graph_pool: GraphPool | None = None,
) -> Drafting:
    """
    The `Drafting` with which a drafter serves requests in flight.

    Args:
        drafter (`Drafter`): proposes the trees.
        target (`PreTrainedModel`): the target.
        pool (`BlockPool`): the K/V blocks.
        max_requests (`int`): most requests that run at once.
        cuda_graphs (`bool` or `"auto"`): see `SpeculativeConfig`.
        graph_pool (`GraphPool`, *optional*): memory shared with the CUDA graphs of other models.

    Raises:
        ValueError: for a drafter of a user's own that watches the target's forwards.
    """
    if isinstance(drafter, DraftModelDrafter):
        return DraftModelDrafting(drafter.for_call(target), pool, cuda_graphs, graph_pool)
    if isinstance(drafter, EagleDrafter):
        return EagleDrafting(drafter.for_call(target), pool, max_requests, cuda_graphs, graph_pool)
    if isinstance(drafter, MedusaDrafter):
        return MedusaDrafting(drafter.for_call(target))
    if type(drafter).watching is not Drafter.watching:
        raise ValueError(
            f"`assistant_model`: {type(drafter).__name__} watches the target's forwards, whose rows change from step "
            "to step here. Pass it to `generate`."
        )
    return OneByOneDrafting(drafter, target)


class DraftModelDrafting(Drafting):
    """Drafts with a draft model. Tokens that are not in its cache yet are forwarded when a tree is proposed."""

    def __init__(
        self,
        drafter: DraftModelDrafter,
        pool: BlockPool,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        self.drafter: Any = drafter  # Any: gets `StepRows` in place of `Sequences`
        device = execution_device(drafter.model)
        num_layers = drafter.model.config.get_text_config(decoder=True).num_hidden_layers
        cache = PagedCache(num_layers, pool, device, PagedGraphs.of(drafter.model, cuda_graphs, graph_pool))
        drafter.begin(cache, None, torch.zeros(1, dtype=torch.long, device=device))

    @property
    def cache(self) -> PagedCache:
        return self.drafter.cache

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        self.drafter.ask(request)
        self.lags(requests, MOST_UNREAD_TOKENS)
        self.cache.seat([row.table for row in requests])
        starts = [min(seen, row.length - 1) for seen, row in zip(self.cache.lengths, requests, strict=True)]
        return self.drafter.propose(StepRows(requests, self.drafter.device, starts))

    def _read(self, requests: list[Request]) -> None:
        """Forwards all tokens of some requests that the draft has not read, except the roots."""
        device, forward = self.drafter.device, self.drafter.forward
        while left := [row for row in requests if self.cache.length_of(row.table) < row.length - 1]:
            own = _fitting(left, [row.length - 1 - self.cache.length_of(row.table) for row in left])
            starts = [self.cache.length_of(row.table) for row in own]
            ends = [min(row.length - 1, start + LONGEST_FORWARD) for row, start in zip(own, starts, strict=True)]
            most = self._width(max(end - start for start, end in zip(starts, ends, strict=True)))
            parts = [row.tokens[start:end] for row, start, end in zip(own, starts, ends, strict=True)]
            # Rows with fewer tokens repeat their last one behind it, at its position.
            tokens = torch.tensor([part + part[-1:] * (most - len(part)) for part in parts], device=device)
            last = torch.tensor([len(part) - 1 for part in parts], device=device)[:, None]
            depths = torch.arange(most, device=device).minimum(last)
            self.cache.seat([row.table for row in own])
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

    part = ModelPart

    @property
    def has_part(self) -> bool:
        return type(self.drafter) is DraftModelDrafter and _is_ready(self.drafter.forward)

    def room(self, request: Request) -> int:
        most = self.drafter.max_positions
        return request.room if most is None else min(request.room, most - request.length)

    def lags(self, requests: list[Request], most: int) -> list[int]:
        self._read([row for row in requests if row.length - self.cache.length_of(row.table) > most])
        return [row.length - min(self.cache.length_of(row.table), row.length - 1) for row in requests]

    def note_proposed(self, requests: list[Request]) -> None:
        for row in requests:
            self.cache.note_length(row.table, row.length)


class EagleDrafting(Drafting):
    """
    Drafts with an EAGLE head. The head reads each prompt chunk right after the target; features of generated tokens
    wait until a tree is proposed, or until there are too many of them.
    """

    def __init__(
        self,
        drafter: EagleDrafter,
        pool: BlockPool,
        max_requests: int,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        self.drafter: Any = drafter  # Any: gets `StepRows` in place of `Sequences`
        self._max_requests = max_requests
        device = execution_device(drafter.head)
        num_layers = drafter.head.config.text_config.num_hidden_layers
        cache = PagedCache(num_layers, pool, device, PagedGraphs.of(drafter.head, cuda_graphs, graph_pool))
        drafter.begin(cache, None, torch.zeros(1, dtype=torch.long, device=device), 0)

    @property
    def cache(self) -> PagedCache:
        return self.drafter.cache

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    def refresh(self) -> None:
        self.drafter.refresh()

    def watching(self, target: InFlightTarget) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return self._num_waiting(request) > 0

    def observe_prompts(self, requests: list[Request], kept: list[list[int]]) -> None:
        features, own, kept = self._take(requests, kept)
        if not own:
            return
        assert self.features is not None
        counts = [len(nodes) for nodes in kept]
        ends = [self.cache.length_of(row.table) + count for row, count in zip(own, counts, strict=True)]
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
        store: Any = self.features
        nodes, size = _nodes_of(taken, kept), store.CAPACITY // 2
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
        if self.features is None:
            most = min(self._max_requests, self.cache.pool.num_blocks)  # each has a block at least
            self.features = WaitingFeatures(most, features.shape[2], self.drafter.device, self.drafter.head.dtype)
        rows = [
            row
            for row, (request, nodes) in enumerate(zip(requests, kept, strict=True))
            if nodes and request.options.plan is not None
        ]
        if len(rows) < len(requests):
            features = features[rows]
        return features, [requests[row] for row in rows], [kept[row] for row in rows]

    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        self.drafter.ask(request)
        counts = self.lags(requests, MOST_UNREAD_TOKENS)
        assert self.features is not None
        self.cache.seat([one.table for one in requests])
        rows = StepRows(requests, self.drafter.device, self.cache.lengths)
        draft = self.drafter.propose_from(rows, self.features.of(requests, max(counts)), counts)
        if draft is not None:
            for row in requests:
                self.features.set_count(row, 0)
        return draft

    def _num_waiting(self, request: Request) -> int:
        return 0 if self.features is None else self.features.count(request)

    def _catch_up(self, requests: list[Request]) -> None:
        """Lets the head read all waiting features of some requests but the last, which stays for the next tree."""
        if not requests:
            return
        assert self.features is not None
        counts = [self._num_waiting(row) for row in requests]
        ends = [self.cache.length_of(row.table) + count for row, count in zip(requests, counts, strict=True)]
        features = self.features.of(requests, self.features.CAPACITY)
        self._read(requests, features, [list(range(count)) for count in counts], [end - 1 for end in ends])
        self.features.keep_last(requests)

    def _read(self, requests: list[Request], features: torch.Tensor, nodes: list[list[int]], ends: list[int]) -> None:
        """
        Forwards features (`[batch, width, size]`) through the head, each with the token behind it. `nodes` are the
        consecutive new nodes of each request. Afterwards the head's cache has `ends` rows of a request, but at most
        one fewer than its text has tokens, because no token is behind the last one.
        """
        width, device = features.shape[1], self.drafter.device
        starts = [self.cache.length_of(row.table) - new[0] for row, new in zip(requests, nodes, strict=True)]
        last = torch.tensor([new[-1] for new in nodes], device=device)[:, None]
        depths = torch.arange(width, device=device).minimum(last)
        parts = [row.tokens[start + 1 : start + 1 + width] for row, start in zip(requests, starts, strict=True)]
        tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=device)
        self.cache.seat([row.table for row in requests])
        for first in range(0, width, LONGEST_FORWARD):
            self.cache.set_lengths([start + first for start in starts])
            piece = slice(first, first + LONGEST_FORWARD)
            self.drafter.cache_features(tokens[:, piece], features[:, piece], depths[:, piece] - first)
        self.cache.set_lengths([min(end, row.length - 1) for end, row in zip(ends, requests, strict=True)])

    def forget(self, request: Request) -> None:
        if self.features is not None:
            self.features.forget(request)
        self.cache.forget(request.table)

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    part = HeadPart
    most_levels = WaitingFeatures.CAPACITY - 2  # beside a waiting feature, the root's and one per level

    @property
    def has_part(self) -> bool:
        return type(self.drafter) is EagleDrafter and _is_ready(self.drafter.forward)

    def lags(self, requests: list[Request], most: int) -> list[int]:
        self._catch_up([row for row in requests if self._num_waiting(row) > most])
        return [self._num_waiting(row) for row in requests]

    def make_room(self, requests: list[Request], count: int) -> None:
        capacity, store = WaitingFeatures.CAPACITY, self.features
        if store is not None and max(store.counts(requests), default=0) + count > capacity:
            most = min(capacity // 2, capacity - count)  # rows that will soon be full catch up as well
            self._catch_up([row for row in requests if store.count(row) > most])

    def note_features(self, requests: list[Request], counts: list[int]) -> None:
        store: Any = self.features
        for row, count in zip(requests, counts, strict=True):
            if count > 0 and row.options.plan is not None:
                store.add(row, count)

    def note_read(self, requests: list[Request], ends: list[int]) -> None:
        for row, end in zip(requests, ends, strict=True):
            if row.options.plan is not None:
                self.cache.note_length(row.table, min(end, row.length - 1))
                if end == row.length and self.features is not None:
                    self.features.set_count(row, 1)

    def note_proposed(self, requests: list[Request]) -> None:
        assert self.features is not None
        for row in requests:
            self.features.set_count(row, 0)
            self.cache.note_length(row.table, row.length - 1)


class MedusaDrafting(Drafting):
    """Drafts with Medusa heads, which read each request's target feature of the last token before the root."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter: Any = drafter
        self._last: weakref.WeakKeyDictionary[Request, torch.Tensor] = weakref.WeakKeyDictionary()

    def refresh(self) -> None:
        self.drafter.refresh()

    def watching(self, target: InFlightTarget) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return request in self._last

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        device, dtype = self.drafter.device, self.drafter.heads.dtype
        taken = self.drafter.take_features() if features is None else features.to(device, dtype)
        last = _nodes_of(taken, [nodes[-1:] for nodes in kept])
        for row, (request, nodes) in enumerate(zip(requests, kept, strict=True)):
            if nodes:
                self._last[request] = last[row]

    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        self.drafter.ask(request)
        starts = [row.length - 1 for row in requests]
        last = torch.cat([self._last[row] for row in requests])
        return self.drafter.propose_from(StepRows(requests, self.drafter.device, starts), last)

    def forget(self, request: Request) -> None:
        self._last.pop(request, None)


def _fitting(requests: list[Request], counts: list[int]) -> list[Request]:
    """The first requests, of `counts` tokens each, that padded to the longest fit into a forward of `MOST_TOKENS`."""
    longest = 0
    for number, count in enumerate(counts):
        longest = max(longest, min(count, LONGEST_FORWARD))
        if number > 0 and (number + 1) * longest > MOST_TOKENS:
            return requests[:number]
    return requests


def _is_ready(forward: TreeForward) -> bool:
    """Whether a draft's forwards can be part of a captured step: it has run before and uses the attention kernel."""
    cache: Any = forward.cache
    return forward.can_be_captured and forward.has_kernel and forward.dtype in DTYPES and cache.has_memory


def _nodes_of(features: torch.Tensor, kept: list[list[int]]) -> torch.Tensor:
    """The features of the kept nodes of every row, one after the other, `[batch, most, features]`."""
    most = max(map(len, kept))
    if all(nodes == list(range(len(nodes))) for nodes in kept):
        return features[:, :most]
    padded = torch.tensor([nodes + [0] * (most - len(nodes)) for nodes in kept], device=features.device)
    return features.gather(1, padded[:, :, None].expand(-1, -1, features.shape[2]))
