"""Draft tokens that spoil a step: NaN after one of them reaches all nodes of its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


NAN_LOGITS = "The model's logits are not numbers (NaN)."


def rows_with_nan(logits: torch.Tensor, highest: torch.Tensor | None = None) -> torch.Tensor:
    """
    Rows of `logits` (`[batch, nodes, vocab]`) that hold NaN at any node, `[batch]` bool.

    The forward of a token may overflow, most likely in float16. In plain `generate` that matters only if the token is
    part of the text; in a tree forward it matters for every node of the row, accepted or not: attention hides a node
    from the others by a weight of zero, and 0 · NaN is NaN. So nothing is taken from a row with drafts whose logits
    hold NaN, and it goes without drafts for a while (`DraftBackoff`), as in plain `generate`. `highest` (`[batch,
    nodes]`) are the largest logits of all nodes, where they are known.
    """
    highest = logits.amax(dim=-1) if highest is None else highest
    return highest.isnan().any(dim=1)  # the largest is NaN where any is


@dataclass
class DraftBackoff:
    """
    Steps without drafts after a spoiled one: one, and 2, 4, … up to `MOST` if the next step with drafts is spoiled
    again, so that a draft that proposes such tokens all the time costs little.
    """

    MOST: ClassVar[int] = 16
    left: int = 0
    """Steps that are still to go without drafts."""
    _next: int = 1
    _tries: int = 0
    """Steps with drafts since the last rest."""

    def begin(self) -> None:
        """Begins after a spoiled step."""
        self.left = 1 if self._tries > 1 else self._next
        self._next, self._tries = min(2 * self.left, self.MOST), 0

    def takes_step(self) -> bool:
        """Whether the step that begins goes without drafts; counts it."""
        if self.left > 0:
            self.left -= 1
            return True
        self._tries += 1
        return False
