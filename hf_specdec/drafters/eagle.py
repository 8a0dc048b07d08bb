"""Drafting with an EAGLE head."""

from __future__ import annotations

from typing import Any

import torch

from ..eagle import EagleHead
from ..trees import Tree
from .features import FeatureDrafter
from .growth import LevelNodes
from .heads import tree_of_head


class EagleDrafter(FeatureDrafter):
    """
    Drafts with an EAGLE head. Row t of the head's input pairs the target's feature of position t with the token of
    position t + 1, and every level of a tree is one more forward, over the head's own hidden states.

    Args:
        head (`EagleHead`): the head.
    """

    head: EagleHead
    runs_in_graphs = True

    @property
    def default_tree(self) -> Tree:  # type: ignore[override]
        """
        The tree that the head's config names; else SafeAILab's dynamic tree of 60 nodes (59 draft tokens), or a
        smaller one on a CPU.
        """
        size = (5, 4, 15) if self.head.device.type == "cpu" else (8, 10, 59)
        return tree_of_head(self.head, *size, num_tokens=self.num_tokens)

    def forward_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._forward_features(tokens, features, position_depths).hidden_states

    def cache_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> None:
        self._forward_features(tokens, features, position_depths, only_cache=True)

    def _forward_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None, **options: bool
    ) -> Any:
        inputs = {"features": features, "inputs_embeds": self._embed(tokens), **options}
        return self.read_rows(tokens, position_depths, inputs)

    def begin_tree(self, states: torch.Tensor | None, roots: torch.Tensor, depth: int) -> torch.Tensor:
        assert states is not None  # the root's row has been read: it pairs the root with the feature before it
        self.states = states
        return self.logits(states)[:, 0]

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, draft vocab]` of one level's nodes, from the states of their parents."""
        tokens = nodes.tokens if self.target_ids is None else self.target_ids[nodes.tokens]
        queries, states = tokens.shape[1], self.states
        if queries > 1 or states.shape[1] > 1:
            parents = nodes.parents[:, :, None].expand(len(tokens), -1, states.shape[2])
            states = states.gather(1, parents)
        inputs = {"hidden_states": states, "inputs_embeds": self._embed(tokens), "logits_to_keep": None}
        query_depths = nodes.node_depths[:, -queries:]
        output = self.forward(
            tokens, nodes.ancestors, query_depths, nodes.node_depths, offset=nodes.offset, inputs=inputs
        )
        self.states = output.hidden_states
        return self.logits(self.states)
