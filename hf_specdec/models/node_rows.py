"""Arguments of a part of a model for some nodes of a forward, each as a row of one token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class NodeRows:
    """
    The nodes that are rows.

    Args:
        shape (`tuple[int, int]`): rows and queries of the forward.
        rows, nodes (`torch.Tensor` of shape `[nodes]`, int64): each node's row, and its place among the queries; for a
            text `[1, 1]` and `[1, tokens]`.
        is_text (`bool`): whether they are a text, which is one row.
    """

    def __init__(self, shape: tuple[int, int], rows: torch.Tensor, nodes: torch.Tensor, is_text: bool = False):
        self.shape, self.rows, self.nodes, self.is_text = shape, rows, nodes, is_text

    def of(self, value: Any, cache: Any) -> Any:
        """An argument: tensors `[1 or batch, queries, …]` as `[nodes, 1, …]`, and `cache` in place of a cache."""
        if isinstance(value, torch.Tensor):
            if value.dim() < 2 or value.shape[1] != self.shape[1] or value.shape[0] not in (1, self.shape[0]):
                return value
            rows, nodes = self.rows.to(value.device), self.nodes.to(value.device)
            own = value.expand(self.shape[0], *value.shape[1:])[rows, nodes]
            return own if self.is_text else own[:, None]
        if isinstance(value, tuple):
            return tuple(self.of(one, cache) for one in value)
        return cache if isinstance(value, Cache) else value
