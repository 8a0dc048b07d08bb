"""Drafting from one feature: the target's last hidden state of the token before the root."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedModel

from ..cache.blocks import BlockPool
from ..cache.device_paged_cache import DevicePagedCache
from ..cache.last_features import LastFeatures
from ..models.structure import execution_device
from ..sequences import Rows, Sequences, StepRows
from ..trees import DraftTree, DynamicTree, TokenTree
from .base import Drafter
from .captured import CapturedDraft
from .drafting import Drafting, nodes_of
from .growth import Warp
from .heads import ModelRefs, in_dtype_of
from .request import DraftRequest


if TYPE_CHECKING:
    from ..engine.captured.rows import InFlightRows
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
    def parts(self) -> tuple[PreTrainedModel, ...]:
        return (self.heads,)

    @property
    def times_key(self) -> Any:
        return self.heads

    @property
    def feature_size(self) -> int:
        """Size of the target's features."""
        return self.heads.config.hidden_size

    def for_call(self, target: PreTrainedModel) -> Self:
        drafter = super().for_call(target)
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

    def take_last(self, last: torch.Tensor) -> None:
        """Sets the features, `[batch, hidden_size]`, from which the next trees are drafted."""
        self._last = last.nan_to_num(0.0, 0.0, 0.0)  # a run of which nothing is taken may have left anything

    def propose_from(self, sequences: Rows, last: torch.Tensor) -> DraftTree | None:
        """`propose` for sequences whose last features, `[batch, hidden_size]`, are kept elsewhere."""
        self.take_last(last)
        return self.propose(sequences)


# ------------------------------------------------------------------------------------- for requests in flight


class CapturedLastFeature(CapturedDraft):
    """
    A draft from one feature in a captured step, of which `LastFeatures` has the newest of every row. A subclass
    implements `grown`; see `CapturedDraft` for the arguments.
    """

    drafter: LastFeatureDrafter

    def __init__(
        self,
        drafting: LastFeatureDrafting,
        tree: TokenTree | DynamicTree | None,
        rows: InFlightRows,
        draft_request: DraftRequest | None,
    ):
        super().__init__(drafting, tree, rows, draft_request)
        assert drafting.features is not None
        self._features = drafting.features.held
        self.drafter = copy.copy(drafting.drafter)
        if draft_request is not None:
            self.drafter.ask(draft_request)

    def write_as(self, cache: DevicePagedCache) -> None:
        return

    def read(self, *args: Any) -> None:
        return

    def propose(self, warp: Warp | None) -> DraftTree:
        if self.tree is None:
            return DraftTree.empty(self.rows.size.rows, self.rows.device)
        return self.grown(self._features.index_select(0, self.rows.places)[:, 0], warp)

    @abstractmethod
    def grown(self, last: torch.Tensor, warp: Warp | None) -> DraftTree:
        """The trees of all rows, from the features `last`, `[rows, hidden_size]`; see `propose`."""


class LastFeatureDrafting(Drafting):
    """Drafts from one feature for requests in flight."""

    features: LastFeatures | None
    drafter: LastFeatureDrafter
    """The drafter of the call, from `attach` to `detach`."""

    def __init__(self, drafter: LastFeatureDrafter, pool: BlockPool, max_requests: int):
        self.drafter = drafter
        self._most = min(max_requests, pool.num_blocks)  # each has a block at least

    @property
    def parts(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.parts

    def attach(self, drafter: Drafter) -> None:
        assert isinstance(drafter, LastFeatureDrafter), "it drafts from one feature"
        self.drafter = drafter

    def detach(self) -> None:
        del self.drafter

    def refresh(self) -> None:
        self.drafter.refresh()

    def watching(self, target: TreeTarget) -> AbstractContextManager[object]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return self.features is not None and self.features.count(request) > 0

    def make_store(self) -> None:
        if self.features is None:
            heads = self.drafter.heads
            self.features = LastFeatures(self._most, self.drafter.feature_size, self.drafter.device, heads.dtype)

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        assert features is None  # captured steps write features to the store themselves
        last = nodes_of(self.drafter.take_features(), [nodes[-1:] for nodes in kept])[:, 0]
        self.make_store()
        rows = [row for row, nodes in enumerate(kept) if nodes and requests[row].options.plan is not None]
        if rows and self.features is not None:
            self.features.put_last([requests[row] for row in rows], last[rows])

    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        assert self.features is not None
        self.drafter.ask(draft_request)
        starts = [request.length - 1 for request in requests]
        last = self.features.of(requests, 1)[:, 0]
        return self.drafter.propose_from(StepRows(requests, self.drafter.device, starts), last)

    def forget(self, request: Request) -> None:
        if self.features is not None:
            self.features.forget(request)

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    @property
    def can_be_captured(self) -> bool:
        return self.captured_draft is not None and self.drafter.grows_on_device

    def lags(self, requests: list[Request]) -> list[int]:
        return [1 for _ in requests]

    def note_read(self, requests: list[Request], ends: list[int]) -> None:
        for request, end in zip(requests, ends, strict=True):
            if request.options.plan is not None and end == request.length and self.features is not None:
                self.features.set_count(request, 1)
