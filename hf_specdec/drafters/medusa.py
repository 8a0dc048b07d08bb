"""Drafting with Medusa heads."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..medusa import MedusaHeads
from ..sequences import Rows
from ..trees import DraftTree, DynamicTree, TokenTree, Tree
from .growth import grow_from_positions
from .heads import tree_of_head
from .last_feature import LastFeatureDrafter


class MedusaDrafter(LastFeatureDrafter):
    """
    Drafts with Medusa heads. All heads read one feature, that of the last token before the root, so that head d
    proposes the same tokens below every node of depth d; a child's rank is its token's rank in the head's logits.

    Args:
        heads (`MedusaHeads`): the heads.
    """

    heads: MedusaHeads

    @property
    def default_tree(self) -> Tree:  # type: ignore[override]
        """
        The tree that the config names; else a dynamic tree, whose shape follows the heads' own probabilities: of 63
        nodes like the reference's static trees, or of 15 on a CPU.
        """
        depth, num_nodes = min(self.heads.config.num_heads, 4), 15 if self.heads.device.type == "cpu" else 63
        return tree_of_head(self.heads, depth, 10, num_nodes, num_tokens=self.num_tokens)

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.heads.config.vocab_size

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return self.heads.config.num_heads

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        config, text_config = self.heads.config, target.config.get_text_config(decoder=True)
        for name, what in (("vocab_size", "vocabulary"), ("hidden_size", "hidden size")):
            if getattr(config, name) != getattr(text_config, name):
                raise ValueError(
                    f"`assistant_model`: the {type(self.heads).__name__} are for a {what} of {getattr(config, name)}, "
                    f"but that of the target {type(target).__name__} is {getattr(text_config, name)}. Use heads that "
                    "were trained for this target."
                )

    def propose(self, sequences: Rows) -> DraftTree | None:
        room = [sequences.room(row) for row in range(sequences.batch_size)]
        tree = self.tree_within(room)
        if tree is None:
            return None
        depth = min(tree.depth, max(room))
        logits = torch.stack([head(self._last) for head in self.heads.heads[:depth]], dim=1)
        return grow_from_positions(tree, logits, depth).to(sequences.device).within(room)
