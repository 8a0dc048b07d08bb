"""`TreeTarget`: the target's forwards over the trees of a step, whatever holds its K/V."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..trees import DraftTree
from .features import Features, watch_features
from .tree_forward import TreeForward


class TreeTarget:
    """
    The target of a call, or of requests in flight.

    Args:
        model (`PreTrainedModel`): the target.
    """

    forward: TreeForward
    """Forwards over the cache of the rows."""
    features: Features | None = None
    """Hidden states recorded for the drafter; None if it reads none."""
    is_running = False
    """
    Whether a forward of this target is running: other callers may run the same model, as a logits processor may.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    @contextmanager
    def watched(self, boundaries: list[int]) -> Iterator[Features]:
        """A context that records hidden states of this target's forwards, also of replays; see `watch_features`."""
        with watch_features(self.model, boundaries, lambda: self.is_running) as self.features:
            try:
                self.record()
                yield self.features
            finally:
                self.features = None
                self.record()

    def record(self) -> None:
        """Lets forwards record `features`."""
        if hasattr(self, "forward"):
            self.forward.features = self.features

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for forwards of this target."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def score_nodes(self, roots: torch.Tensor, draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        """
        Forwards the root (`[batch, 1]`, int64) and all draft nodes of every row; or the roots alone, if the model
        refuses the positions of nodes. Returns the tree that was forwarded, and the output with its logits, `[batch,
        nodes + 1, vocab]`.
        """
        try:
            return draft, self._forward(roots, draft)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not self.gives_up_positions(draft):
                raise
        if self.features is not None:
            self.features.drop()
        draft = DraftTree.empty(len(roots), roots.device)
        return draft, self._forward(roots, draft)

    def gives_up_positions(self, draft: DraftTree) -> bool:
        """
        Whether a forward that failed may succeed without the draft nodes: code of a user's own may refuse positions
        past those of its config.
        """
        return False

    def _forward(self, roots: torch.Tensor, draft: DraftTree) -> ModelOutput:
        topology, drafted, position_depths = draft.topology, draft.tokens, None
        if draft.valid is not None:
            drafted = torch.where(draft.valid, drafted, roots)  # invalid nodes repeat the root
            position_depths = topology.depths * draft.usable()
        tokens = torch.cat([roots, drafted], dim=1)
        with self.running():
            return self.forward(tokens, topology.ancestors, topology.depths, position_depths=position_depths)
