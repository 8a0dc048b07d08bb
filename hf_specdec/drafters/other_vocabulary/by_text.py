"""Drafting in texts, which are encoded with the target's tokenizer."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch

from ...trees import DraftTree, DynamicTree, TokenTree
from ..continuations import Continuation, Filled, as_draft_tree, fill_dynamic, fill_static
from ..growth import grow
from .drafter import OtherVocabularyDrafter


MOST_TEXTS = 8
"""Most texts that the draft writes in a step."""
MOST_LEVELS = 64
"""Most tokens of such a text."""
MOST_LEVELS_EACH = 4
"""Most of them for one token of the target."""


class WrittenTextDrafter(OtherVocabularyDrafter):
    """
    Lets the draft model write texts: its best tokens at the root, each continued with the best ones. Encoded with the
    target's tokenizer and merged, they fill the tree. So its tokens are not drawn, and are verified by draws from p.

    Args:
        model (`PreTrainedModel`), translation (`Translation`): see `OtherVocabularyDrafter`.
    """

    has_probabilities = reads_noise = runs_in_graphs = False
    num_tokens = None  # type: ignore[assignment]
    way = "in texts"

    def _grown(self, tree: TokenTree | DynamicTree, sequences: Any, room: list[int]) -> DraftTree | None:
        if isinstance(tree, TokenTree):
            width, fill = max(tree.ranks[1 : tree.level_offsets[2]]) + 1, partial[Filled](fill_static, tree)
        else:
            width, fill = tree.top_k, partial[Filled](fill_dynamic, tree)
        width = min(width, MOST_TEXTS, self.root_logits.shape[-1])
        each = min(max(self.translation.tokens_ratio, 1), MOST_LEVELS_EACH)
        levels = min(math.ceil(min(tree.depth, max(room)) * each), MOST_LEVELS)
        if self.max_positions is not None:
            levels = max(1, min(levels, self.max_positions - max(sequences.lengths)))
        rows, texts = [], sequences.requests
        for text, most, written in zip(texts, room, self._write(width, levels), strict=True):
            depth, root = min(tree.depth, most), Continuation()
            for rank, tokens in enumerate(written if depth > 0 else []):
                root.add(self.translation.written(text.last, tokens)[:depth], weight=0.5**rank)
            rows.append(fill(root, depth) if depth > 0 else Filled())
        num_nodes = max(len(filled.tokens) for filled in rows)
        if num_nodes == 0:
            return None
        return as_draft_tree(rows, num_nodes, sequences.device, self.request.vocab_size)

    def _write(self, width: int, levels: int) -> list[list[list[int]]]:
        """The texts of every row, the likeliest first token first."""
        draft = grow(_branches(width, levels), self.root_logits, self.run_level, levels)
        tokens = draft.tokens.view(len(draft.tokens), levels, width)
        return torch.transpose(tokens, 1, 2).tolist()


@lru_cache(maxsize=64)
def _branches(width: int, depth: int) -> TokenTree:
    """`width` chains of `depth` tokens under the root."""
    return TokenTree.from_branching((width, *[1] * (depth - 1)))
