"""`Drafting`: what proposes trees for the requests of a step, with a state per request, since rows change."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..cache.paged_cache import PagedCache
from ..cache.pending_features import PendingFeatures
from ..kernels import DTYPES
from ..trees import DraftTree, DynamicTree, Evidence, TokenTree
from .base import CachedDrafter, Drafter
from .request import DraftRequest


if TYPE_CHECKING:
    from ..engine.request import Request
    from ..forwards.target import TreeTarget
    from .captured import CapturedDraft

MOST_UNREAD_TOKENS = 16
"""Most unread tokens of a row that are read in the forward that drafts; rows further behind catch up before it."""


class Drafting(ABC):
    """
    Proposes draft trees for the requests of any step. After every forward of the target, `observe` is called with the
    requests in its rows and the nodes that were committed, whether or not a draft was proposed, so that the draft can
    catch up before it proposes again.
    """

    cache: PagedCache | None = None
    """The draft's own K/V cache, which uses the requests' block tables; None if it has no cache."""

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The models that run with tree attention in order to draft."""
        return ()

    @property
    def parts(self) -> tuple[PreTrainedModel, ...]:
        """The models and heads that draft; see `Drafter.parts`."""
        return self.models

    @property
    def about(self) -> str | None:
        """What a user is told of how it drafts; None if that is plain."""
        return None

    def attach(self, drafter: Drafter) -> None:
        """Takes the drafter of another call, with the same models; see `Engine.take_drafter`."""
        raise NotImplementedError(f"{type(self).__name__} takes no other drafter.")

    def detach(self) -> None:
        """Drops the drafter, and with it its models; see `Engine.let_drafter_go`."""
        raise NotImplementedError(f"{type(self).__name__} keeps its drafter.")

    def refresh(self) -> None:
        """Recomputes what is derived from weights, which may have changed; called when the engine starts to run."""
        return

    def watching(self, target: TreeTarget) -> AbstractContextManager[object]:
        """A context that records the target's hidden states, entered by the engine's thread before it runs."""
        return nullcontext()

    def knows(self, request: Request) -> bool:
        """Whether the draft has seen enough of a request to propose a tree."""
        return True

    @abstractmethod
    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        """Proposes a tree for each of `requests`, whose blocks have room for it; None for no trees at all."""

    def evidence(self, requests: list[Request]) -> Evidence | None:
        """What the draft knows of requests before it proposes, by their place in the list; see `Drafter.evidence`."""
        return None

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        """
        Takes note of a forward of the target over `requests`. `kept` has the committed nodes of each row; `features`
        (`[batch, nodes, size]`) are the target's hidden states, where `watching` could not record them.
        """
        return

    def observe_prompts(self, requests: list[Request], kept: list[list[int]]) -> None:
        """Takes note of a prefill forward of the target; `kept` has the new tokens of each row's chunk."""
        self.observe(requests, kept)

    def wipe(self, request: Request) -> None:
        """Removes NaN from what a spoiled step has left of a request after its committed tokens."""
        if self.cache is not None:
            self.cache.wipe_after(request.table, self.cache.length_of(request.table))
        if self.features is not None:
            self.features.wipe(request)

    def mark_nan(self, request: Request) -> None:
        """Takes note that K/V and features of a request may have NaN, so that nobody else reads them."""
        if self.cache is not None:
            self.cache.mark_nan(request.table, but=self.cache.pool.drafted)
        if self.features is not None:
            self.features.mark_nan(request)

    def forget(self, request: Request) -> None:
        """Drops the state of a request that is over or has lost its K/V."""
        return

    # ---------------------------------------------------------------------------------- blocks that requests share

    tokens_ahead = 0
    """Tokens behind a block on which its K/V in the draft's cache depend."""
    reads_features = False
    """Whether the draft cannot read a text without the target's features of it."""

    def keep_block_ends(self) -> None:
        """Keeps from now on what it needs to go on behind a block, beside the K/V in it."""
        return

    def num_cached(self, request: Request) -> int | None:
        """Tokens at the start of a request's text whose K/V the draft's blocks have; None: it needs none there."""
        return None

    def take_prefix(self, request: Request, length: int) -> None:
        """Takes over `length` tokens of a request's text, whose K/V are in the blocks that it shares."""
        return

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    captured_draft: type[CapturedDraft] | None = None
    """Class of the `CapturedDraft`; None if the draft cannot be captured."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a step can be captured with the draft in it now."""
        return False

    def num_slots(self, tree: TokenTree | DynamicTree) -> int:
        """Most slots after the root that target or draft write in a step with a tree; see `Drafter.num_slots`."""
        return tree.num_slots

    def room(self, request: Request) -> int:
        """Levels of draft tokens that a request can use in a step."""
        return request.room

    def catch_up(self, requests: list[Request], most: int) -> None:
        """Lets the draft read from the host what it has not read of requests with more than `most` unread tokens."""
        return

    def lags(self, requests: list[Request]) -> list[int]:
        """
        Number of tokens of each request that the draft has not read, root included.

        Raises:
            NotImplementedError: for a draft that cannot be captured.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured.")

    def can_grow(self, tree: TokenTree | DynamicTree) -> bool:
        """Whether the draft can grow a tree in a captured step."""
        return tree.depth <= self.most_levels

    has_confidence = False
    """Whether the draft estimates its acceptance before a tree grows; see `FeatureDrafter.confidence`."""
    most_levels = sys.maxsize
    """Most levels of a tree that the draft can grow in a captured step."""
    features: PendingFeatures | None = None
    """Store of target features that an EAGLE head has not read yet; None if the draft keeps none on the device."""

    def make_store(self) -> None:
        """Makes `features` before the first prompt comes, if the draft has any; else that prompt makes it."""
        return

    def make_room(self, requests: list[Request], count: int) -> None:
        """Makes room in `features` for `count` more features per request, by reading those that wait."""
        return

    def note_features(self, requests: list[Request], counts: list[int]) -> None:
        """Takes note that a captured step put features of `counts` committed tokens per request into `features`."""
        return

    def note_proposed(self, requests: list[Request]) -> None:
        """Takes note that the draft within a captured step has read all tokens of these requests."""
        return

    def note_dropped(self, requests: list[Request]) -> None:
        """As `note_proposed`, for a step of which nothing else is taken."""
        return

    def note_read(self, requests: list[Request], ends: list[int]) -> None:
        """Takes note that a captured prefill step has read prompts up to `ends`; with `features`, so has the head."""
        return


class CachedDrafting(Drafting):
    """Drafts with the one model of a drafter, whose K/V are in `cache`."""

    cache: PagedCache
    drafter: CachedDrafter
    """The drafter of the call, from `attach` to `detach`."""

    @abstractmethod
    def _begin(self) -> None:
        """Prepares the drafter for forwards into the cache."""

    def attach(self, drafter: Drafter) -> None:
        assert isinstance(drafter, CachedDrafter), "its model needs a cache"
        self.drafter = drafter
        self.cache.serve(*drafter.models)
        self._begin()

    def detach(self) -> None:
        del self.drafter
        self.cache.serve(None)

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    @property
    def can_be_captured(self) -> bool:
        """Whether it grows trees on the device, and its forwards have run before, by kernels alone."""
        forward = self.drafter.forward
        can_run = self.drafter.grows_on_device and forward.can_be_captured and forward.has_kernels
        return can_run and forward.dtype in DTYPES and self.cache.has_memory

    def num_cached(self, request: Request) -> int:
        return 0 if self.cache.state_layers else self.cache.length_of(request.table)

    def take_prefix(self, request: Request, length: int) -> None:
        self.cache.note_length(request.table, length)


def nodes_of(features: torch.Tensor, kept: list[list[int]]) -> torch.Tensor:
    """The features of the kept nodes of every row, one after the other, `[batch, most, features]`."""
    most = max(map(len, kept))
    if all(nodes == list(range(len(nodes))) for nodes in kept):
        return features[:, :most]
    padded = torch.tensor([nodes + [0] * (most - len(nodes)) for nodes in kept], device=features.device)
    return features.gather(1, padded[:, :, None].expand(-1, -1, features.shape[2]))
