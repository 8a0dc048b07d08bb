"""The draft of a head that reads the target's features, within a captured step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...trees import DraftTree, DynamicTree, TokenTree
from ...trees.confidence import Calibration, calibrated_chances, wide_tree
from ..captured import GrowingDraft
from ..growth import LikeliestNodes, Warp
from ..request import DraftRequest


if TYPE_CHECKING:
    from ...engine.captured.rows import InFlightRows
    from .drafter import FeatureDrafter
    from .drafting import FeatureDrafting


class CapturedFeatures(GrowingDraft):
    """
    A head that reads the target's features: its cache has a row for every token but the first after the step, each
    read with the feature of the token before it. Without a tree the head only catches up. Where the request says how
    the head's estimates of its acceptance are read, the tree has the nodes that are likeliest by these.
    """

    drafter: FeatureDrafter

    def __init__(
        self,
        drafting: FeatureDrafting,
        tree: TokenTree | DynamicTree | None,
        rows: InFlightRows,
        draft_request: DraftRequest | None,
    ):
        self._likeliest: LikeliestNodes | None = None
        if draft_request is not None and draft_request.calibration is not None and isinstance(tree, TokenTree):
            learnt = draft_request.calibration().learnt[: tree.depth]
            wide = wide_tree(tree, min(len(learnt[0]), drafting.drafter.num_tokens))
            self._likeliest = LikeliestNodes(wide, tree.num_nodes, len(learnt[0]), rows.device)
            self._learnt = torch.zeros(len(learnt), len(learnt[0]), device=rows.device)
            self._trust = torch.zeros(2, device=rows.device)
            tree = wide
        super().__init__(drafting, tree, rows, draft_request)
        drafter = self.drafter
        assert drafting.features is not None, "a step is captured after `make_store`"
        self._pending = drafting.features.held[:, : rows.size.lag]
        self.held = [self.held, *drafter.constants]

    def propose(self, warp: Warp | None) -> DraftTree:
        rows, drafter = self.rows, self.drafter
        # For each token of a row's tail, the target's feature of the token before it.
        starts, features = rows.lengths - 1 - rows.counts, self._pending.index_select(0, rows.places)
        if self.tree is None:
            self.read(starts, rows.tail, features, rows.counts)
            return DraftTree.empty(rows.size.rows, rows.device)
        self.cache.at(starts)
        states = self.read_rows(rows.tail, features, rows.counts)
        self.cache.at(rows.lengths - 1)
        root_logits = drafter.begin_tree(states, rows.roots, self.tree.depth)
        chances = None
        if self._likeliest is not None:  # before any child is drawn
            self.confidences = confidences = drafter.confidence(root_logits, rows.roots, is_quick=True).nan_to_num()
            chances = calibrated_chances(confidences, self._learnt, *self._trust)
        limits = rows.limits(drafter.target_ids, drafter.request.vocab_size)
        draft = drafter.grow(self.tree, root_logits, self.tree.depth, warp, limits=limits)
        if self._likeliest is not None and chances is not None:
            draft = self._likeliest.of(draft, chances)
        return draft.in_vocabulary(drafter.target_ids, drafter.request.vocab_size)

    def load_calibration(self, calibration: Calibration) -> None:
        self._learnt.copy_(torch.tensor(calibration.learnt[: len(self._learnt)], device="cpu"), non_blocking=True)
        self._trust.copy_(torch.tensor([calibration.share, calibration.factor], device="cpu"), non_blocking=True)

    def read(
        self,
        starts: torch.Tensor,
        tokens: torch.Tensor,
        features: torch.Tensor,
        counts: torch.Tensor,
        position_depths: torch.Tensor | None = None,
    ) -> None:
        self.cache.at(starts)
        self.cache_rows(tokens, features, counts, position_depths)

    def read_rows(
        self, tokens: torch.Tensor, features: torch.Tensor, counts: torch.Tensor, *depths: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What `FeatureDrafter.forward_features` returns for the last of `counts` tokens of every row."""
        states = self.drafter.forward_features(tokens, features, *depths)
        if states is None:
            return None
        last = (counts - 1).clamp(min=0)
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))

    def cache_rows(
        self, tokens: torch.Tensor, features: torch.Tensor, counts: torch.Tensor, *depths: torch.Tensor | None
    ) -> None:
        """`FeatureDrafter.cache_features` for `counts` tokens of every row."""
        self.drafter.cache_features(tokens, features, *depths)
