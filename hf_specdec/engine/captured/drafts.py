"""The draft within a captured step: catching up with accepted tokens, and growing trees."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ...cache.device_paged_cache import DevicePagedCache
from ...drafters.growth import Warp, grow, held_levels
from ...forwards.node_inputs import causal_chain
from ...trees import DraftTree, DynamicTree, TokenTree, Topology
from .rows import InFlightRows


if TYPE_CHECKING:
    from ...drafters import DraftRequest


class CapturedDraft(ABC):
    """The draft within a captured step."""

    drafter: Any = None
    """The drafter whose forwards run in the step; None if there are none."""

    @abstractmethod
    def write_as(self, cache: DevicePagedCache) -> None:
        """Lets the draft's cache write by the tables of the target's `cache`, which are the same for both."""

    def without_drafter(self) -> CapturedDraft:
        """A copy that holds no more than a graph needs as long as it lives."""
        held = copy.copy(self)
        held.drafter = None
        return held

    @abstractmethod
    def propose(self, warp: Warp | None) -> DraftTree:
        """Grows the trees of all rows. `warp` makes the scores that children are drawn from, if drawn; see `grow`."""


class NoDraft(CapturedDraft):
    """What stands for the draft in a step without drafts; does nothing."""

    def __init__(self, rows: InFlightRows):
        self.rows = rows
        self.held = Topology.of_tree(None, rows.device)

    def write_as(self, cache: DevicePagedCache) -> None:
        return

    def propose(self, warp: Warp | None) -> DraftTree:
        return DraftTree.empty(self.rows.size.rows, self.rows.device)


class GrowingDraft(CapturedDraft):
    """
    A draft with a cache, which grows trees level by level.

    Args:
        drafting (`Drafting`): the draft.
        tree (`TokenTree` or `DynamicTree`, *optional*): the tree to grow; None for no tree.
        rows (`InFlightRows`): the step's rows.
        asked (`DraftRequest`, *optional*): options of the draft; None without a tree.
    """

    def __init__(
        self, drafting: Any, tree: TokenTree | DynamicTree | None, rows: InFlightRows, asked: DraftRequest | None
    ):
        self.rows, self.tree, drafter = rows, tree, drafting.drafter
        self.cache = DevicePagedCache(drafting.cache, rows.tables)
        self.first_slots = torch.zeros(rows.size.rows, dtype=torch.long, device=rows.device)
        self.chain = causal_chain(rows.size.lag, rows.device)
        # Tensors cached per tree elsewhere, and held here because the graph needs them as long as it lives.
        self.held = Topology.of_tree(None, rows.device) if tree is None else held_levels(tree, rows.device)
        self.drafter = copy.copy(drafter)
        if asked is not None:
            self.drafter.ask(asked)
        self.drafter.forward = drafter.forward.over(self.cache, self.first_slots, None, self.first_slots)

    def write_as(self, cache: DevicePagedCache) -> None:
        self.cache.write_tables, self.cache.places = cache.write_tables, cache.places

    def _grown(self, root_logits: torch.Tensor, warp: Warp | None) -> DraftTree:
        assert self.tree is not None
        return grow(self.tree, root_logits, self.drafter.run_level, self.tree.depth, warp)


class CapturedDraftModel(GrowingDraft):
    """A draft model, whose cache has all tokens after the step, root included."""

    def propose(self, warp: Warp | None) -> DraftTree:
        rows = self.rows
        self.cache.at(rows.lengths - rows.counts)
        logits = self.drafter.forward(rows.tail, *self.chain).logits
        self.cache.at(rows.lengths)
        last = torch.arange(len(logits), device=logits.device), rows.counts - 1
        return self.drafter.after_known(self._grown(logits[last], warp), rows.tail[last][:, None])


class CapturedHead(GrowingDraft):
    """
    An EAGLE head, whose cache has a row for every token but the first after the step, each read with the feature of
    the token before it. Without a tree the head only catches up.
    """

    def __init__(
        self, drafting: Any, tree: TokenTree | DynamicTree | None, rows: InFlightRows, asked: DraftRequest | None
    ):
        super().__init__(drafting, tree, rows, asked)
        drafter = self.drafter
        self._waiting = drafting.features.held[:, : rows.size.lag]
        self.held = [self.held, drafter.held_rows, getattr(drafter, "target_ids", None)]

    def propose(self, warp: Warp | None) -> DraftTree:
        rows, drafter = self.rows, self.drafter
        # For each token of a row's tail, the target's feature of the token before it.
        starts, features = rows.lengths - 1 - rows.counts, self._waiting.index_select(0, rows.places)
        if self.tree is None:
            self.read(starts, rows.tail, features)
            return DraftTree.empty(rows.size.rows, rows.device)
        self.cache.at(starts)
        states = drafter.forward_features(rows.tail, features)
        last = (rows.counts - 1)[:, None, None].expand(-1, 1, states.shape[2])
        drafter.states = states.gather(1, last)
        self.cache.at(rows.lengths - 1)
        draft = self._grown(drafter.logits(drafter.states)[:, 0], warp)
        return draft.in_vocabulary(drafter.target_ids, drafter.request.vocab_size)

    def read(
        self,
        starts: torch.Tensor,
        tokens: torch.Tensor,
        features: torch.Tensor,
        position_depths: torch.Tensor | None = None,
    ) -> None:
        """
        Lets the head read tokens with their features, without drafting from them; see `EagleDrafter.cache_features`.

        Args:
            starts (`torch.Tensor` of shape `[rows]`, int64): first slot of each row in the head's cache to write.
            tokens (`torch.Tensor` of shape `[rows, nodes]`, int64): the tokens.
            features (`torch.Tensor` of shape `[rows, nodes, size]`): features of the tokens before them.
            position_depths (`torch.Tensor` of shape `[rows, nodes]`, int64, *optional*): positions, counted from the
                first token; by default 0, 1, 2, ….
        """
        self.cache.at(starts)
        self.drafter.cache_features(tokens, features, position_depths)
