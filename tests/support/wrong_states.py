"""Wrong ways to commit a step to states: all of its nodes, or none."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdec.cache.state_layers import StateLayer
from hf_specdec.states import Path


_settle = StateLayer.settle


def settle_none(layer: Any, path: Path) -> None:
    """Commits no node of a tree."""
    if layer.cache.topology.counts is None:
        path = Path(path.nodes, torch.zeros_like(path.is_on))
    _settle(layer, path)


def settle_all(layer: Any, path: Path) -> None:
    """Commits all nodes of a tree."""
    topology = layer.cache.topology
    if topology.counts is None:
        every = torch.arange(topology.num_queries).repeat(len(path.nodes), 1)
        path = Path(every, path.is_on.any(dim=1, keepdim=True).expand(every.shape))
    _settle(layer, path)
