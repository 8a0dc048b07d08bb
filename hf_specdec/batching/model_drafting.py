"""Drafting with models for requests that come and go: all requests of a step share the draft's forwards."""

from __future__ import annotations

import itertools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter, DraftModelDrafter, DraftRequest, EagleDrafter, MedusaDrafter
from ..forward import TreeForward, causal_chain, execution_device
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


if TYPE_CHECKING:
    from .target import InFlightTarget

LONGEST_FORWARD = 512
"""Tokens of a text that a draft forwards at once, when it has much to catch up with."""
MOST_TOKENS = 8192
"""Of all texts together."""
FEW = 16
"""Rows that lag by no more than this are caught up with beside the others; those further behind before."""


def drafting_of(
    drafter: Drafter,
    target: PreTrainedModel,
    pool: BlockPool,
    cuda_graphs: bool | Literal["auto"] = False,
    graph_pool: GraphPool | None = None,
) -> Drafting:
    """
    How a drafter serves requests that come and go; for `cuda_graphs` see `SpeculativeConfig`.

    Raises:
        ValueError: for a drafter of a user's own that watches the target's forwards.
    """
    if isinstance(drafter, DraftModelDrafter):
        return DraftModelDrafting(drafter.for_call(target), pool, cuda_graphs, graph_pool)
    if isinstance(drafter, EagleDrafter):
        return EagleDrafting(drafter.for_call(target), pool, cuda_graphs, graph_pool)
    if isinstance(drafter, MedusaDrafter):
        return MedusaDrafting(drafter.for_call(target))
    if type(drafter).watching is not Drafter.watching:
        raise ValueError(
            f"`assistant_model`: {type(drafter).__name__} watches the target's forwards, whose rows change from step "
            "to step here. Pass it to `generate`."
        )
    return OneByOneDrafting(drafter, target)


class DraftModelDrafting(Drafting):
    """A draft model: what it has seen of a request is in its cache, and it forwards the rest when it is asked."""

    def __init__(
        self,
        drafter: DraftModelDrafter,
        pool: BlockPool,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        self.drafter: Any = drafter  # requests in flight are to it what the sequences of a call are
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
        self.drafter.request = request
        self.lags(requests, FEW)
        self.cache.seat([row.table for row in requests])
        self.drafter._shift = [0] * len(requests)
        starts = [min(seen, row.length - 1) for seen, row in zip(self.cache.lengths, requests, strict=True)]
        return self.drafter.propose(StepRows(requests, self.drafter.device, starts))

    def _read(self, requests: list[Request]) -> None:
        """Forwards what the draft has not seen of some texts, but for the roots."""
        device, forward = self.drafter.device, self.drafter.forward
        while left := [row for row in requests if self.cache.length_of(row.table) < row.length - 1]:
            own = _fitting(left, [row.length - 1 - self.cache.length_of(row.table) for row in left])
            starts = [self.cache.length_of(row.table) for row in own]
            ends = [min(row.length - 1, start + LONGEST_FORWARD) for row, start in zip(own, starts, strict=True)]
            most = max(end - start for start, end in zip(starts, ends, strict=True))
            parts = [row.tokens[start:end] for row, start, end in zip(own, starts, ends, strict=True)]
            # What rows with fewer tokens repeat lies behind what counts, at the last one's position.
            tokens = torch.tensor([part + part[-1:] * (most - len(part)) for part in parts], device=device)
            last = torch.tensor([len(part) - 1 for part in parts], device=device)[:, None]
            depths = torch.arange(most, device=device).minimum(last)
            self.cache.seat([row.table for row in own])
            forward(tokens, *causal_chain(most, device), position_depths=depths, logits_to_keep=1)
            self.cache.set_lengths(ends)

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
    """An EAGLE head: the target's features wait with their request until the head is asked, or there are many."""

    def __init__(
        self,
        drafter: EagleDrafter,
        pool: BlockPool,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        self.drafter: Any = drafter  # requests in flight are to it what the sequences of a call are
        device = execution_device(drafter.head)
        num_layers = drafter.head.config.text_config.num_hidden_layers
        cache = PagedCache(num_layers, pool, device, PagedGraphs.of(drafter.head, cuda_graphs, graph_pool))
        drafter.begin(cache, None, torch.zeros(1, dtype=torch.long, device=device), 0)
        self._waiting: weakref.WeakKeyDictionary[Request, list[torch.Tensor]] = weakref.WeakKeyDictionary()

    @property
    def cache(self) -> PagedCache:
        return self.drafter.cache

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    def watching(self, target: InFlightTarget) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return bool(self._waiting.get(request))

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        device, dtype = self.drafter.device, self.drafter.head.dtype
        taken = self.drafter._features.take(device, dtype) if features is None else features.to(device, dtype)
        self.num_features, features = taken.shape[2], _nodes_of(taken, kept)
        for row, (request, nodes) in enumerate(zip(requests, kept, strict=True)):
            if request.options.plan is None or not nodes:
                continue
            pieces = self._waiting.setdefault(request, [])
            pieces.append(features[row : row + 1, : len(nodes)])
            if len(pieces) > FEW:  # each keeps those of all rows of its step
                self._waiting[request] = [torch.cat(pieces, dim=1)]
        self._read([request for request in requests if self._num_waiting(request) >= LONGEST_FORWARD])

    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        self.drafter.ask(request)
        self.lags(requests, FEW)
        draft = self.drafter.propose(self._seat(requests, [self._waiting[row] for row in requests]))
        self.drafter.sequences = None  # nobody is to keep requests that are over
        if not self.drafter._waiting:
            for row in requests:
                self._waiting[row] = []
        return draft

    def _num_waiting(self, request: Request) -> int:
        return sum(features.shape[1] for features in self._waiting.get(request, ()))

    def _read(self, requests: list[Request]) -> None:
        """Forwards all features of some requests but the last, which is left for the next tree."""
        while requests:
            own = _fitting(requests, [self._num_waiting(row) for row in requests])
            requests = [row for row in requests if row not in own]
            features = [torch.cat(self._waiting[row], dim=1) for row in own]
            self._seat(own, [[states[:, :-1]] for states in features])
            with nullcontext() if self.cache.graphs is None else self.cache.graphs.resting():
                self.drafter.catch_up(self.drafter.sequences)
            self.drafter.sequences = None
            for row, states in zip(own, features, strict=True):
                self._waiting[row] = [states[:, -1:].clone()]

    def _seat(self, requests: list[Request], features: list[list[torch.Tensor]]) -> StepRows:
        """Makes these requests the drafter's rows, with the features that it is to forward."""
        self.cache.seat([request.table for request in requests])
        rows = StepRows(requests, self.drafter.device, self.cache.lengths)
        self.drafter.sequences, self.drafter.root_states = rows, None
        self.drafter._waiting = [_padded(features)]
        return rows

    def forget(self, request: Request) -> None:
        self._waiting.pop(request, None)
        self.cache.forget(request.table)

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    part = HeadPart

    @property
    def has_part(self) -> bool:
        return type(self.drafter) is EagleDrafter and _is_ready(self.drafter.forward)

    def lags(self, requests: list[Request], most: int) -> list[int]:
        self._read([row for row in requests if self._num_waiting(row) > most])
        return [self._num_waiting(row) for row in requests]

    def fill(self, part: HeadPart, requests: list[Request]) -> None:
        features, _ = _padded([self._waiting[row] for row in requests])
        part.features[: len(requests), : features.shape[1]] = features

    def note_proposed(self, requests: list[Request]) -> None:
        for row in requests:
            self._waiting[row] = []
            self.cache.note_length(row.table, row.length - 1)


class MedusaDrafting(Drafting):
    """Medusa heads: of every request they read the feature of the last token before the root."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter: Any = drafter
        drafter.device = execution_device(drafter.heads)
        self._last: weakref.WeakKeyDictionary[Request, torch.Tensor] = weakref.WeakKeyDictionary()

    def watching(self, target: InFlightTarget) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return request in self._last

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        device, dtype = self.drafter.device, self.drafter.heads.dtype
        taken = self.drafter._features.take(device, dtype) if features is None else features.to(device, dtype)
        last = _nodes_of(taken, [nodes[-1:] for nodes in kept])
        for row, (request, nodes) in enumerate(zip(requests, kept, strict=True)):
            if nodes:
                self._last[request] = last[row]

    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        self.drafter.request = request
        self.drafter._last = torch.cat([self._last[row] for row in requests])
        starts = [row.length - 1 for row in requests]
        return self.drafter.propose(StepRows(requests, self.drafter.device, starts))

    def forget(self, request: Request) -> None:
        self._last.pop(request, None)


def _fitting(requests: list[Request], counts: list[int]) -> list[Request]:
    """As many of the requests, of so many tokens each, as a forward may have that pads all to the longest."""
    longest = 0
    for number, count in enumerate(counts):
        longest = max(longest, min(count, LONGEST_FORWARD))
        if number > 0 and (number + 1) * longest > MOST_TOKENS:
            return requests[:number]
    return requests


def _is_ready(forward: TreeForward) -> bool:
    """Whether a draft's forwards can be part of a whole step: it has run before, and attends by the kernel."""
    cache: Any = forward.cache
    return forward.can_be_captured and forward.has_kernel and forward.dtype in DTYPES and cache.has_memory


def _padded(features: list[list[torch.Tensor]]) -> tuple[torch.Tensor, list[int]]:
    """
    The pieces `[1, tokens, features]` of every row one after the other, `[batch, most, features]`, and how many tokens
    each row has; those behind are copies. With as few launches for many rows as for one.
    """
    counts = [sum(piece.shape[1] for piece in pieces) for pieces in features]
    flat = torch.cat([piece for pieces in features for piece in pieces], dim=1)[0]
    most = max(counts)
    if min(counts) == most:
        return flat.view(len(counts), most, -1), counts
    ends = list(itertools.accumulate(counts))
    places = [
        [end - count + min(place, count - 1) for place in range(most)] for count, end in zip(counts, ends, strict=True)
    ]
    return flat[torch.tensor(places, device=flat.device)], counts


def _nodes_of(features: torch.Tensor, kept: list[list[int]]) -> torch.Tensor:
    """The features of the kept nodes of every row, one after the other, `[batch, most, features]`."""
    most = max(map(len, kept))
    if all(nodes == list(range(len(nodes))) for nodes in kept):
        return features[:, :most]
    padded = torch.tensor([nodes + [0] * (most - len(nodes)) for nodes in kept], device=features.device)
    return features.gather(1, padded[:, :, None].expand(-1, -1, features.shape[2]))
