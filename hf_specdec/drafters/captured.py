"""The draft within a captured step: catching up with accepted tokens, and growing trees."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from ..cache.device_paged_cache import DevicePagedCache
from ..forwards.node_inputs import causal_chain
from ..trees import DraftTree, DynamicTree, TokenTree, Topology
from ..trees.confidence import Calibration
from .growth import Warp, grow, held_levels


if TYPE_CHECKING:
    from ..engine.captured.rows import InFlightRows
    from ..forwards.tree_forward import TreeForward
    from .base import CachedDrafter, Drafter
    from .drafting import CachedDrafting, Drafting
    from .request import DraftRequest


class CapturedDraft(ABC):
    """
    The draft within a captured step.

    Args:
        drafting (`Drafting`, *optional*): the draft; None in a step without drafts.
        tree (`TokenTree` or `DynamicTree`, *optional*): the tree to grow; None for no tree.
        rows (`InFlightRows`): the step's rows.
        draft_request (`DraftRequest`, *optional*): options of the draft; None without a tree.
    """

    drafter: Drafter | None = None
    """The drafter whose forwards run in the step; None if there are none."""

    confidences: torch.Tensor | None = None
    """The draft's confidence in the run that is captured, `[rows, levels]`; None if it is not asked."""

    def __init__(
        self,
        drafting: Drafting | None,
        tree: TokenTree | DynamicTree | None,
        rows: InFlightRows,
        draft_request: DraftRequest | None,
    ):
        self.rows, self.tree = rows, tree
        # Tensors cached per tree elsewhere, and held here because the graph needs them as long as it lives.
        self.held: object = Topology.of_tree(None, rows.device) if tree is None else held_levels(tree, rows.device)

    @property
    def forward(self) -> TreeForward | None:
        """The draft's forwards over a cache of its own, if it has one."""
        return getattr(self.drafter, "forward", None)

    def load_calibration(self, calibration: Calibration) -> None:
        """Copies to the device how the draft's estimates are read from now on."""
        raise NotImplementedError(f"{type(self).__name__} has no confidence.")

    @abstractmethod
    def write_as(self, cache: DevicePagedCache) -> None:
        """Lets the draft's cache write by the tables of the target's `cache`, which are the same for both."""

    def read(
        self,
        starts: torch.Tensor,
        tokens: torch.Tensor,
        features: torch.Tensor,
        counts: torch.Tensor,
        position_depths: torch.Tensor | None = None,
    ) -> None:
        """
        Lets the draft read tokens with their features, without drafting from them; see
        `FeatureDrafter.cache_features`.

        Args:
            starts (`torch.Tensor` of shape `[rows]`, int64): first slot of each row in the draft's cache to write.
            tokens (`torch.Tensor` of shape `[rows, nodes]`, int64): the tokens.
            features (`torch.Tensor` of shape `[rows, nodes, size]`): features of the tokens before them.
            counts (`torch.Tensor` of shape `[rows]`, int64): how many of each row stay in the cache.
            position_depths (`torch.Tensor` of shape `[rows, nodes]`, int64, *optional*): positions, counted from the
                first token; by default 0, 1, 2, ….
        """
        raise NotImplementedError(f"{type(self).__name__} reads no features.")

    def without_drafter(self) -> CapturedDraft:
        """A copy that holds no more than a graph needs as long as it lives."""
        held = copy.copy(self)
        held.drafter = held.confidences = None
        return held

    def leave(self, is_left: torch.Tensor) -> None:
        """Leaves the draft's states of some rows (`[rows]`, bool) as they are, until the host loads these again."""
        return

    @abstractmethod
    def propose(self, warp: Warp | None) -> DraftTree:
        """Grows the trees of all rows. `warp` makes the scores that children are drawn from, if drawn; see `grow`."""


class NoDraft(CapturedDraft):
    """What stands for the draft in a step without drafts; does nothing."""

    def __init__(self, rows: InFlightRows):
        super().__init__(None, None, rows, None)

    def write_as(self, cache: DevicePagedCache) -> None:
        return

    def propose(self, warp: Warp | None) -> DraftTree:
        return DraftTree.empty(self.rows.size.rows, self.rows.device)


class GrowingDraft(CapturedDraft):
    """A draft with a cache, which grows trees level by level; see `CapturedDraft` for the arguments."""

    drafter: CachedDrafter

    def __init__(
        self,
        drafting: CachedDrafting,
        tree: TokenTree | DynamicTree | None,
        rows: InFlightRows,
        draft_request: DraftRequest | None,
    ):
        super().__init__(drafting, tree, rows, draft_request)
        drafter = drafting.drafter
        self.cache = DevicePagedCache(drafting.cache, rows.tables, rows.draft_slots)
        self.first_slots = torch.zeros(rows.size.rows, dtype=torch.long, device=rows.device)
        self.chain = causal_chain(rows.size.lag, rows.device)
        self.drafter = copy.copy(drafter)
        if draft_request is not None:
            self.drafter.ask(draft_request)
        self.drafter.forward = drafter.forward.over(self.cache, self.first_slots, self.first_slots)

    def leave(self, is_left: torch.Tensor) -> None:
        self.cache.leave(is_left)

    def write_as(self, cache: DevicePagedCache) -> None:
        self.cache.write_tables, self.cache.places = cache.write_tables, cache.places

    def _grown(self, root_logits: torch.Tensor, warp: Warp | None) -> DraftTree:
        assert self.tree is not None
        limits = self.rows.limits()
        return grow(self.tree, root_logits, self.drafter.run_level, self.tree.depth, warp, limits=limits)
