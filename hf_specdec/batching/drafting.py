"""Drafting for requests in flight: a drafter's state is kept per request, because rows change between steps."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter, DraftRequest
from ..generation.sequences import Sequences
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
    Proposes draft trees for the requests of any step. After every forward of the target, `observe` is called with the
    requests in its rows and the nodes that were committed, whether or not a draft was proposed, so that the draft can
    catch up before it proposes again.
    """

    @property
    def cache(self) -> PagedCache | None:
        """The draft's own K/V cache, which uses the requests' block tables; None if it has no cache."""
        return None

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The models that run with tree attention in order to draft."""
        return ()

    def refresh(self) -> None:
        """Recomputes what is derived from weights, which may have changed; called when the engine starts to run."""
        return

    def watching(self, target: InFlightTarget) -> AbstractContextManager[Any]:
        """A context that records the target's hidden states, entered by the engine's thread before it runs."""
        return nullcontext()

    def knows(self, request: Request) -> bool:
        """Whether the draft has seen enough of a request to propose a tree."""
        return True

    @abstractmethod
    def propose(self, requests: list[Request], request: DraftRequest) -> DraftTree | None:
        """Proposes a tree for each of `requests`, whose blocks have room for it; None for no trees at all."""

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        """
        Takes note of a forward of the target over `requests`. `kept` has the committed nodes of each row; `features`
        (`[batch, nodes, size]`) are the target's hidden states, where `watching` could not record them.
        """
        return

    def observe_prompts(self, requests: list[Request], kept: list[list[int]]) -> None:
        """Takes note of a prefill forward of the target; `kept` has the new tokens of each row's chunk."""
        self.observe(requests, kept)

    def forget(self, request: Request) -> None:
        """Drops the state of a request that is over or has lost its K/V."""
        return

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    part: type[InFlightPart] | None = None
    """Class of the draft's part of a captured step; None if the draft cannot be captured."""

    @property
    def has_part(self) -> bool:
        """Whether the draft can be part of a captured step now."""
        return False

    def room(self, request: Request) -> int:
        """Levels of draft tokens that a request can use in a step."""
        return request.room

    def lags(self, requests: list[Request], most: int) -> list[int]:
        """
        Number of tokens of each request that the draft has not read, root included. Requests with more than `most`
        unread tokens catch up first. Only for drafts with a `part`.

        Raises:
            NotImplementedError: for a draft without a `part`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no part in steps on the device.")

    most_levels = sys.maxsize
    """Most levels of a tree that the draft can grow in a captured step."""
    features: WaitingFeatures | None = None
    """Store of target features that an EAGLE head has not read yet; None if the draft keeps none on the device."""

    def make_room(self, requests: list[Request], count: int) -> None:
        """Makes room in `features` for `count` more features per request, by reading those that wait."""
        return

    def note_features(self, requests: list[Request], counts: list[int]) -> None:
        """Takes note that a captured step put features of `counts` committed tokens per request into `features`."""
        return

    def note_proposed(self, requests: list[Request]) -> None:
        """Takes note that the draft's part of a captured step has read all tokens of these requests."""
        return

    def note_read(self, requests: list[Request], ends: list[int]) -> None:
        """Takes note that a captured prefill step has read prompts up to `ends`; with `features`, so has the head."""
        return


class OneByOneDrafting(Drafting):
    """Drafts with a separate drafter per request: for n-gram drafters and drafters of a user's own."""

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
        except Exception as error:  # an error of a user's drafter fails only its request
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
            except Exception as error:  # an error of a user's drafter; a finished request stays finished
                if not row.is_over:
                    row.fail(error)

    def forget(self, request: Request) -> None:
        self._drafters.pop(request, None)


def _check(draft: DraftTree, drafter: Drafter, request: DraftRequest) -> None:
    """Raises `TypeError` or `ValueError` for a proposal of a user's drafter that would fail the whole step."""
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
