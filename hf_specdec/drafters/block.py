"""Drafting with a block head, which predicts all levels of a tree in one forward."""

from __future__ import annotations

from typing import Any

import torch

from ..block import BlockHead
from ..cache import TreeCache
from ..checkpoints.layer_fields import windows_of
from ..trees import DraftTree, DynamicTree, TokenTree, Tree
from .features import FeatureDrafter
from .growth import LevelNodes, Noise, TokenLimits, Warp, grow_from_pairs, grow_from_positions, pairs_of
from .heads import tree_of_head


class BlockDrafter(FeatureDrafter):
    """
    Drafts with a block head (DFlash, JetSpec, DSpark, DFlash2, P-EAGLE). The head's cache keeps the K/V of the
    target's features alone. A step forwards one block, the root and mask tokens at the positions after it; row by row
    this gives logits of the tokens 1, 2, … after the root, from which trees grow without another forward. Heads whose
    logits depend on the token before (Markov heads, DFlash2's selector) score the children of every node given its
    token: all pairs at once for best tokens, level by level where they are drawn or a grammar limits them.

    Args:
        head (`BlockHead`): the head.
    """

    head: BlockHead
    runs_in_graphs = True

    @property
    def default_tree(self) -> Tree:  # type: ignore[override]
        """The tree that the head's config names; else the best 60 nodes of all levels, or 15 on a CPU."""
        size = (8, 15) if self.head.device.type == "cpu" else (16, 60)
        return tree_of_head(self.head, self.head.num_drafts, *size, num_tokens=self.num_tokens)

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return self.head.num_drafts

    def num_slots(self, tree: TokenTree | DynamicTree) -> int:
        return max(tree.num_nodes, self.head.config.num_rows)

    @property
    def tokens_ahead(self) -> int:
        return int(self.head.config.is_peagle)  # whose rows pair features with the tokens after them

    def begin(self, cache: TreeCache, visible: torch.Tensor | None, shift: torch.Tensor, first: int) -> None:
        super().begin(cache, visible, shift, first)
        self.forward.has_causal_windows = self.head.config.window_is_causal
        if self.head.config.window_from_anchor and any(windows_of(self.head.config.text_config)):
            self.forward.windows_from_root = True
            self.forward.has_kernel = self.forward.can_be_captured = False  # which count from each query
        self._mask = self.head.block_mask(self.device)[None]
        self._depths = torch.arange(self._mask.shape[1], device=self.device)[None]

    @property
    def constants(self) -> list[object]:
        return [*super().constants, self._mask, self._depths]

    def forward_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        reads_states = self.head.config.is_peagle
        return self._read(tokens, features, position_depths, only_cache=not reads_states).hidden_states

    def cache_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> None:
        self._read(tokens, features, position_depths, only_cache=True)

    def _read(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None, only_cache: bool
    ) -> Any:
        inputs: dict[str, Any] = {"features": features, "only_cache": only_cache}
        if self.head.config.is_peagle:  # whose rows pair features with the tokens after them
            inputs["inputs_embeds"] = self._embed(tokens)
        return self.read_rows(tokens, position_depths, inputs)

    def begin_tree(self, states: torch.Tensor | None, roots: torch.Tensor, depth: int) -> torch.Tensor:
        tokens = self.head.block_tokens(roots[:, 0])
        inputs = {"inputs_embeds": self.head.block_embeddings(tokens, self._embed), "logits_to_keep": None}
        block = self.forward(tokens, self._mask, self._depths, inputs=inputs).hidden_states
        block = block[:, self.head.first_row :]
        self.states = (block if states is None else torch.cat([states, block], dim=1))[:, :depth]
        self.all_logits = self.logits(self.states)
        carried: torch.Tensor | None = None
        self._level, self._carried, self._roots = 0, carried, roots
        return self.all_logits[:, 0]

    def _given_roots(self) -> torch.Tensor:
        """Logits after the roots, `[batch, draft vocab]`, where these depend on their tokens."""
        logits, self._carried = self.head.conditional_logits(
            self.all_logits[:, :1], self.states[:, :1], self._roots, None
        )
        return logits[:, 0]

    @property
    def has_confidence(self) -> bool:
        return self.head.confidence_head is not None

    def confidence(self, root_logits: torch.Tensor, roots: torch.Tensor, is_quick: bool = False) -> torch.Tensor:
        """See `FeatureDrafter.confidence`: where the estimate reads the token before, that of a greedy chain."""
        levels, confidences, parents, carried = self.states.shape[1], list[torch.Tensor](), roots, None
        if not self.head.config.confidence_with_markov:
            return self._estimates(self.states, parents)
        if is_quick:
            return self._estimates(self.states, torch.cat([roots, self._targets(self.all_logits[:, :-1])], dim=1))
        for level in range(levels):
            here = slice(level, level + 1)
            confidences.append(self._estimates(self.states[:, here], parents))
            if level + 1 == levels:
                break
            base, states = self.all_logits[:, here], self.states[:, here]
            logits, carried = self.head.conditional_logits(base, states, parents, carried)
            parents = self._targets(logits)
        return torch.cat(confidences, dim=1)

    def _targets(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's token of the best column of logits `[batch, rows, draft vocab]`."""
        best = logits.argmax(dim=-1)
        return best if self.target_ids is None else self.target_ids[best]

    def _estimates(self, states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        estimates: Any = self.head.confidence_logits(states, parents)
        return estimates.float().sigmoid()

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        self._level += 1
        queries, position = nodes.tokens.shape[1], slice(self._level, self._level + 1)
        logits = self.all_logits[:, position].expand(-1, queries, -1)
        if not self.head.conditions:
            return logits
        tokens = nodes.tokens if self.target_ids is None else self.target_ids[nodes.tokens]
        states, carried = self.states[:, position].expand(-1, queries, -1), self._carried
        if carried is not None:
            parents = nodes.parents[:, :, None].expand(len(tokens), -1, carried.shape[2])
            carried = carried.gather(1, parents)
        logits, self._carried = self.head.conditional_logits(logits, states, tokens, carried)
        return logits

    def grow(
        self,
        tree: TokenTree | DynamicTree,
        root_logits: torch.Tensor,
        depth: int,
        warp: Warp | None = None,
        noise: Noise | None = None,
        limits: TokenLimits | None = None,
    ) -> DraftTree:
        if warp is None and limits is None:
            if not self.head.conditions:
                return grow_from_positions(tree, self.all_logits, depth)
            if self.head.pairs_tokens:
                logits, states = self.all_logits[:, :depth], self.states[:, :depth]
                pairs = pairs_of(self.head, logits, states, self._roots, self.target_ids, tree)
                return grow_from_pairs(tree, pairs, depth)
        if self.head.conditions:
            root_logits = self._given_roots()
        return super().grow(tree, root_logits, depth, warp, noise, limits)
