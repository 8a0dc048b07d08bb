"""What drafts that are models have in common: how much they read at once, and whether they can be captured."""

from __future__ import annotations

from typing import Any

import torch

from ...forwards.tree_forward import TreeForward
from ...kernels import DTYPES


MOST_UNREAD_TOKENS = 16
"""Most unread tokens of a row that are read in the forward that drafts; rows further behind catch up before it."""


def can_be_captured(forward: TreeForward) -> bool:
    """Whether a draft's forwards can be part of a captured step: it has run before and uses the attention kernel."""
    cache: Any = forward.cache
    return forward.can_be_captured and forward.has_kernel and forward.dtype in DTYPES and cache.has_memory


def nodes_of(features: torch.Tensor, kept: list[list[int]]) -> torch.Tensor:
    """The features of the kept nodes of every row, one after the other, `[batch, most, features]`."""
    most = max(map(len, kept))
    if all(nodes == list(range(len(nodes))) for nodes in kept):
        return features[:, :most]
    padded = torch.tensor([nodes + [0] * (most - len(nodes)) for nodes in kept], device=features.device)
    return features.gather(1, padded[:, :, None].expand(-1, -1, features.shape[2]))
