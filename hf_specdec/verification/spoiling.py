"""Draft tokens that spoil a step: NaN behind one of them reaches all nodes of its row."""

from __future__ import annotations

import torch


def rows_with_nan(logits: torch.Tensor) -> torch.Tensor:
    """
    Rows of `logits` (`[batch, nodes, vocab]`) that hold NaN at any node, `[batch]` bool.

    The forward of a token may overflow, most likely in float16. In plain `generate` that matters only if the token is
    part of the text; in a tree forward it matters for every node of the row, accepted or not: attention hides a node
    from the others by a weight of zero, and 0 · NaN is NaN. So nothing is taken from a row with drafts whose logits
    hold NaN; its next step goes without drafts, as in plain `generate`.
    """
    return logits.amax(dim=-1).isnan().any(dim=1)  # the largest is NaN where any is
