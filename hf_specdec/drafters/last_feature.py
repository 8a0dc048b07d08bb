"""Drafting from one feature: the target's last hidden state of the token before the root."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..models.structure import execution_device
from ..sequences import Rows, Sequences, StepRows
from ..trees import DraftTree
from .base import Drafter, DraftRequest
from .drafting import Drafting, nodes_of
from .heads import ModelRefs, in_dtype_of


if TYPE_CHECKING:
    from ..engine.request import Request
    from ..forwards.target import TreeTarget


class LastFeatureDrafter(Drafter):
    """
    Drafts from one feature of every row, that of the last token before the root. A subclass implements `propose`,
    which finds the features in `_last`, `[batch, hidden_size]`.

    Args:
        heads (`PreTrainedModel`): what computes the drafts.
    """

    def __init__(self, heads: Any):
        self.heads = heads

    @property
    def times_key(self) -> Any:
        return self.heads

    def for_call(self, target: PreTrainedModel) -> LastFeatureDrafter:
        drafter: Any = super().for_call(target)
        drafter._model_refs = ModelRefs(self.heads, target)
        drafter.refresh()
        return drafter

    def refresh(self) -> None:
        """Takes over changes of the heads since `for_call` made the drafter."""
        models = self._model_refs.models()
        if models is not None:
            self.heads = in_dtype_of(*models)
        self.device = execution_device(self.heads)

    @contextmanager
    def watching(self, target: TreeTarget) -> Iterator[None]:
        with target.watched([]) as self._features:
            yield

    def take_features(self) -> torch.Tensor:
        """What forwards of the target have computed since the last time, `[batch, tokens, hidden_size]`."""
        return self._features.take(self.device, self.heads.dtype)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        super().start(sequences, request)
        self._last = self.take_features()[:, -1]

    def commit(self, paths: list[list[int] | None]) -> None:
        features = self.take_features()
        nodes = torch.tensor([path[-1] if path else 0 for path in paths], device=self.device)
        last = features[torch.arange(len(paths), device=self.device), nodes]
        if None in paths:
            kept = torch.tensor([path is None for path in paths], device=self.device)[:, None]
            last = torch.where(kept, self._last, last)
        self._last = last

    @abstractmethod
    def propose(self, sequences: Rows) -> DraftTree | None:
        raise NotImplementedError(f"{type(self).__name__} must implement `propose`.")

    def propose_from(self, sequences: Rows, last: torch.Tensor) -> DraftTree | None:
        """`propose` for sequences whose last features, `[batch, hidden_size]`, are kept elsewhere."""
        self._last = last
        return self.propose(sequences)


# ------------------------------------------------------------------------------------- for requests in flight


class LastFeatureDrafting(Drafting):
    """Drafts from one feature for requests in flight."""

    def __init__(self, drafter: LastFeatureDrafter):
        self.drafter = drafter
        self._last: weakref.WeakKeyDictionary[Request, torch.Tensor] = weakref.WeakKeyDictionary()

    def refresh(self) -> None:
        self.drafter.refresh()

    def watching(self, target: TreeTarget) -> AbstractContextManager[Any]:
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
