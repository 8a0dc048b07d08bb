"""Drafting with a drafter of its own for each request: n-gram drafters, and drafters of a user's own."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..sequences import Sequences
from ..trees import DraftTree, Evidence
from ..trees.joining import join_drafts
from .base import Drafter
from .drafting import Drafting
from .proposals import check_proposal
from .request import DraftRequest


if TYPE_CHECKING:
    from ..engine.request import Request


class OneByOneDrafting(Drafting):
    """Drafts with a separate drafter per request: for n-gram drafters and drafters of a user's own."""

    UNKNOWN = 0.5
    """Evidence for a request whose drafter has not begun."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel):
        self.drafter, self.target = drafter, target
        self.device = target.device if drafter.models else torch.device("cpu")
        self._drafters: weakref.WeakKeyDictionary[Request, tuple[Drafter, Sequences]] = weakref.WeakKeyDictionary()

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        drafts = [self._propose(request, draft_request) for request in requests]
        parts = [([row], draft) for row, draft in enumerate(drafts) if draft is not None]
        return join_drafts(parts, len(requests), self.device) if parts else None

    def _propose(self, request: Request, draft_request: DraftRequest) -> DraftTree | None:
        try:
            drafter, sequences = self._of(request, draft_request)
            drafter.request = replace(
                draft_request,
                noises=None if request.noise is None else [request.noise],
                grammars=None if request.options.grammar is None else [request.options.grammar],
            )
            sequences.extend(0, request.tokens[sequences.lengths[0] :])
            draft = drafter.propose(sequences)
            if draft is None:
                return None
            check_proposal(draft, drafter, draft_request)
            return draft.within([request.room])
        except Exception as error:  # an error of a user's drafter fails only its request
            request.fail(error)
            return None

    def evidence(self, requests: list[Request]) -> Evidence | None:
        if type(self.drafter).evidence is Drafter.evidence:
            return None
        found = [self._evidence(request) for request in requests]
        if None in found:
            return None
        return {place: its.get(0) for place, its in enumerate(found) if its is not None}

    def _evidence(self, request: Request) -> Evidence | None:
        if request not in self._drafters:
            return {0: self.UNKNOWN}
        drafter, sequences = self._drafters[request]
        try:
            sequences.extend(0, request.tokens[sequences.lengths[0] :])
            return drafter.evidence(sequences)
        except Exception as error:  # an error of a user's drafter fails only its request
            request.fail(error)
            return {}

    def _of(self, request: Request, draft_request: DraftRequest) -> tuple[Drafter, Sequences]:
        if request not in self._drafters:
            drafter = self.drafter.for_call(self.target)
            sequences = Sequences(torch.tensor([request.tokens], device=self.device), max_length=request.max_length)
            drafter.start(sequences, draft_request)
            self._drafters[request] = drafter, sequences
        return self._drafters[request]

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        for request, nodes in zip(requests, kept, strict=True):
            if request not in self._drafters:
                continue
            try:
                self._drafters[request][0].commit([nodes[1:] if nodes else None])
            except Exception as error:  # an error of a user's drafter; a finished request stays finished
                if not request.is_over:
                    request.fail(error)

    def forget(self, request: Request) -> None:
        self._drafters.pop(request, None)
