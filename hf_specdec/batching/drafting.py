"""Drafters for requests that come and go: what a drafter knows of its rows is kept per request."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter, DraftRequest
from ..sequences import Sequences
from ..trees import DraftTree
from .joining import join_drafts
from .paged_cache import PagedCache
from .request import Request
from .waiting_features import WaitingFeatures


if TYPE_CHECKING:
    from .device_steps.drafts import InFlightPart
    from .target import InFlightTarget


class Drafting(ABC):
    """
    Proposes trees for the requests of a step, whichever they are. After every forward of the target it is told which
    requests were its rows and what of them was kept, whether or not it was asked before: so it can catch up when it is
    asked again.
    """

    @property
    def cache(self) -> PagedCache | None:
        """The draft's own K/V, if it has any: they go by the blocks of the requests."""
        return None

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The models that run over trees."""
        return ()

    def refresh(self) -> None:
        """Asked before the models run, for a while: their weights may have changed since they ran last."""
        return

    def watching(self, target: InFlightTarget) -> AbstractContextManager[Any]:
        """Entered before the target's first forward, by the thread that runs it."""
        return nullcontext()

    def knows(self, request: Request) -> bool:
        """Whether it can propose anything for a request by now."""
        return True

    @abstractmethod
    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        """A tree for every one of these requests, or None. Their blocks have room for it."""

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        """
        The target has forwarded these rows; `kept` says which of the forward's nodes are committed now. `features`
        (`[batch, nodes, size]`) are the target's, where nobody could watch.
        """
        return

    def observe_prompts(self, requests: list[Request], kept: list[list[int]]) -> None:
        """The same of parts of texts, whose tokens follow each other."""
        self.observe(requests, kept)

    def forget(self, request: Request) -> None:
        """The request is over, or its K/V are gone."""
        return

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    part: type[InFlightPart] | None = None
    """What drafts there, if there is such a thing."""

    @property
    def has_part(self) -> bool:
        """Whether it can draft there now."""
        return False

    def room(self, request: Request) -> int:
        """Levels of draft tokens that a request can use."""
        return request.room

    def lags(self, requests: list[Request], most: int) -> list[int]:
        """
        How many tokens it has not seen of each, the root included, once it has read those beyond `most`. Only asked of
        what has a part.
        """
        raise NotImplementedError(f"{type(self).__name__} has no part in steps on the device.")

    most_levels = sys.maxsize
    """Of a tree that it can draft there."""
    features: WaitingFeatures | None = None
    """Where the features go of those steps, if it keeps them on the device."""

    def make_room(self, requests: list[Request], count: int) -> None:
        """There are to be places for so many more features of each."""
        return

    def note_features(self, requests: list[Request], counts: list[int]) -> None:
        """So many tokens of each are committed, and their features are among `features`."""
        return

    def note_proposed(self, requests: list[Request]) -> None:
        """Its part has drafted for these, or only read: it has seen their texts."""
        return

    def note_read(self, requests: list[Request], ends: list[int]) -> None:
        """So many tokens of each prompt have been read on the device, by its part as well if it has `features`."""
        return


class OneByOneDrafting(Drafting):
    """A drafter of its own for every request: for those without a model, whose rows share no forward anyway."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel):
        self.drafter, self.target = drafter, target
        self.device = target.device if drafter.models else torch.device("cpu")
        self._drafters: weakref.WeakKeyDictionary[Request, tuple[Drafter, Sequences]] = weakref.WeakKeyDictionary()

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        drafts = [self._propose(row, request) for row in requests]
        parts = [([row], draft) for row, draft in enumerate(drafts) if draft is not None]
        return join_drafts(parts, len(requests), self.device) if parts else None

    def _propose(self, row: Request, request: DraftRequest) -> DraftTree | None:
        try:
            drafter, sequences = self._of(row, request)
            drafter.request = request
            sequences.extend(0, row.tokens[sequences.lengths[0] :])
            draft = drafter.propose(sequences)
            if draft is None:
                return None
            _check(draft, drafter, request)
            return draft.within([row.room])
        except Exception as error:  # whatever a user's drafter raises is that request's own
            row.fail(error)
            return None

    def _of(self, row: Request, request: DraftRequest) -> tuple[Drafter, Sequences]:
        if row not in self._drafters:
            drafter = self.drafter.for_call(self.target)
            sequences = Sequences(torch.tensor([row.tokens], device=self.device), max_length=row.max_length)
            drafter.start(sequences, request)
            self._drafters[row] = drafter, sequences
        return self._drafters[row]

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        for row, nodes in zip(requests, kept, strict=True):
            if row not in self._drafters:
                continue
            try:
                self._drafters[row][0].commit([nodes[1:] if nodes else None])
            except Exception as error:  # as above; what is finished stays so
                if not row.is_over:
                    row.fail(error)

    def forget(self, request: Request) -> None:
        self._drafters.pop(request, None)


def _check(draft: DraftTree, drafter: Drafter, request: DraftRequest) -> None:
    """Raises for what a user's drafter may propose and a step of many requests could not be done with."""
    name, most = f"`{type(drafter).__name__}.propose`", request.tree.num_nodes
    if not isinstance(draft, DraftTree):
        raise TypeError(f"{name} returned {type(draft).__name__}. Return a DraftTree, or None.")
    if len(draft.tokens) != 1:
        raise ValueError(f"{name} returned {len(draft.tokens)} rows for 1. Return a tree for each row of `sequences`.")
    if draft.num_nodes > most:
        raise ValueError(
            f"{name} returned {draft.num_nodes} nodes, but there is memory for the {most} of the step's tree. Return "
            "no more than `tree_within(room)` has, or ask for a larger `tree`."
        )
    counted = draft.tokens if draft.valid is None else draft.tokens[draft.valid]
    foreign = counted[(counted < 0) | (counted >= request.vocab_size)].tolist()
    if foreign:
        raise ValueError(
            f"{name} returned token {foreign[0]}, but the target knows {request.vocab_size} from 0. Mark nodes that "
            "are not to count in `valid`."
        )
