"""Drafting in the tokens that target and draft share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.structure import execution_device
from ...trees import DraftTree, DynamicTree, TokenTree
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
    way = "in the tokens that it shares with the target"

    def __init__(self, model: PreTrainedModel, translation: Translation):
        super().__init__(model, translation)
        self._draft_tokens = translation.draft_tokens.to(execution_device(model))
        self._target_tokens = translation.target_tokens.to(execution_device(model))

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return len(self._draft_tokens)

    def _grown(self, tree: TokenTree | DynamicTree, sequences: Any, room: list[int]) -> DraftTree:
        noise = self.request.noise([text.num_read for text in sequences.requests], self._target_tokens)
        root = self.root_logits.index_select(-1, self._draft_tokens)
        draft = grow(tree, root, self.run_level, max(room), self.request.warp_if_drawn, noise)
        return draft.in_vocabulary(self._target_tokens, self.request.vocab_size).within(room)

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, shared]` of one level's nodes, whose tokens are places among the shared ones."""
        tokens = self._draft_tokens[nodes.tokens]
        nodes = LevelNodes(tokens, nodes.parents, nodes.ancestors, nodes.node_depths, nodes.offset)
        return DraftModelDrafter.run_level(self, nodes).index_select(-1, self._draft_tokens)
