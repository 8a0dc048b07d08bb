"""Drafting in the tokens that target and draft share."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ...models.structure import execution_device
from ...sequences import Sequences
from ...trees import DraftTree
from ..draft_model import DraftModelDrafter
from ..growth import LevelNodes, grow
from .drafter import OtherVocabularyDrafter
from .translation import Translation


class SharedTokensDrafter(OtherVocabularyDrafter):
    """
    Proposes tokens that the draft model and the target share. Where they are drawn, q is the softmax of the draft's
    scores over these tokens alone, after the warpers. So q at a node depends on the committed text and on the path to
    the node: the model reads the text encoded anew, and the path token by token.

    Args:
        model (`PreTrainedModel`), translation (`Translation`): see `OtherVocabularyDrafter`.
    """

    runs_in_graphs = False

    def __init__(self, model: PreTrainedModel, translation: Translation):
        super().__init__(model, translation)
        self._draft_tokens = translation.draft_tokens.to(execution_device(model))
        self._target_tokens = translation.target_tokens.to(execution_device(model))

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return len(self._draft_tokens)

    def propose(self, sequences: Sequences) -> DraftTree | None:  # type: ignore[override]
        room = self.read(sequences)
        tree = self.tree_within(room)
        if tree is None:
            return None
        self.forward_texts()
        noise = self.request.noise(sequences.lengths, self._target_tokens)
        root = self.root_logits.index_select(-1, self._draft_tokens)
        draft = grow(tree, root, self.run_level, max(room), self.request.warp_if_drawn, noise)
        draft = draft.in_vocabulary(self._target_tokens, self.request.vocab_size)
        return draft.to(sequences.device).within(room)

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, shared]` of one level's nodes, whose tokens are places among the shared ones."""
        tokens = self._draft_tokens[nodes.tokens]
        nodes = LevelNodes(tokens, nodes.parents, nodes.ancestors, nodes.node_depths, nodes.offset)
        return DraftModelDrafter.run_level(self, nodes).index_select(-1, self._draft_tokens)
