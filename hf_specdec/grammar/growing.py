"""Grammars along a tree that grows: no node is spent on a token that its row's grammar does not allow there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .mask import GrammarMask


if TYPE_CHECKING:
    from ..drafters.growth import LevelNodes


class GrowingMask:
    """
    Hides from a draft's logits what grammars do not allow at the nodes of a tree; see `TokenLimits`. What is drawn is
    drawn from what is left, so that q is the distribution after the mask, as p is.

    Args:
        rows (`Sequence`): grammar and new tokens of every row, root included; None for a row without a grammar.
        vocab_size (`int`): size of the target's vocabulary.
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's token of each of the
            draft's.
    """

    def __init__(
        self,
        rows: Sequence[tuple[GrammarMask, list[int]] | None],
        vocab_size: int,
        token_ids: torch.Tensor | None = None,
    ):
        self._rows, self._num_bytes, self._token_ids = rows, -(-vocab_size // 8), token_ids
        self._paths = [[[] if row is None else row[1]] for row in rows]

    def at_root(self, logits: torch.Tensor) -> torch.Tensor:
        return self._masked(logits[:, None])[:, 0]

    def below(self, nodes: LevelNodes, logits: torch.Tensor) -> torch.Tensor:
        tokens = nodes.tokens if self._token_ids is None else self._token_ids[nodes.tokens]
        parents = nodes.parents.expand_as(tokens).tolist()
        self._paths = [
            [[*above[parent], token] for parent, token in zip(*own, strict=True)]
            for above, *own in zip(self._paths, parents, tokens.tolist(), strict=True)
        ]
        return self._masked(logits)

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, nodes, draft vocab]`, of nodes at the ends of the paths."""
        columns = self._token_ids
        if columns is None:
            columns = torch.arange(logits.shape[-1], device=logits.device)
        bits = np.full((*logits.shape[:2], self._num_bytes), 255, dtype=np.uint8)
        for row, (of_row, paths) in enumerate(zip(self._rows, self._paths, strict=True)):
            for node, path in enumerate(paths if of_row is not None else ()):
                allowed = None if of_row is None else of_row[0].allowed_after(path)
                if allowed is not None:
                    bits[row, node, : len(allowed)] = allowed[: self._num_bytes]
                    bits[row, node, len(allowed) :] = 0
        packed = torch.from_numpy(bits).to(logits.device)
        hidden = (packed[..., columns >> 3] >> (columns & 7)) & 1 == 0  # index_select takes six times as long on a CPU
        # What the draft's vocabulary lacks cannot be proposed: nothing is hidden where all would be.
        return logits.masked_fill(hidden & ~hidden.all(dim=-1, keepdim=True), -torch.inf)
