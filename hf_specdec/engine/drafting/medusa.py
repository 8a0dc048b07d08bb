"""Drafting with Medusa heads: all requests of a step share their forward."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ...drafters import DraftRequest, MedusaDrafter
from ...trees import DraftTree
from ..request import Request
from ..step_rows import StepRows
from .base import Drafting
from .forwards import nodes_of


if TYPE_CHECKING:
    from ..target import InFlightTarget


class MedusaDrafting(Drafting):
    """Drafts with Medusa heads, which read each request's target feature of the last token before the root."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter = drafter
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
        last = nodes_of(taken, [nodes[-1:] for nodes in kept])
        for row, (request, nodes) in enumerate(zip(requests, kept, strict=True)):
            if nodes:
                self._last[request] = last[row]

    def propose(self, requests: list[Request], asked: DraftRequest) -> DraftTree | None:
        self.drafter.ask(asked)
        starts = [request.length - 1 for request in requests]
        last = torch.cat([self._last[request] for request in requests])
        return self.drafter.propose_from(StepRows(requests, self.drafter.device, starts), last)

    def forget(self, request: Request) -> None:
        self._last.pop(request, None)
