"""Attention with a bias for the distance of tokens (Inkling): over a tree distances are those of the nodes' texts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.modules import modules_of
from ..states import running_cache


@contextmanager
def biased_along_paths(model: PreTrainedModel) -> Iterator[None]:
    """A context in which layers with a bias for the distance between slots count it along each node's text."""
    hooks: list[Any] = []
    for module in modules_of(model):
        if "rel_extent" not in vars(module) or not isinstance(getattr(module, "proj", None), nn.Parameter):
            continue
        if "relative_distance" in inspect.signature(module.forward).parameters:
            hooks.append(module.register_forward_pre_hook(_with_distances, with_kwargs=True))
        else:
            hooks.append(module.register_forward_hook(_bias))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_distances(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of Inkling 2: puts distances `[batch, 1, queries, slots]` in place of those of slots."""
    cache = running_cache()
    if cache is None or cache.context is None:
        return None
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    distances = cache.context.query_slots[:, :, None] - cache.context.key_slots[:, None]
    given["relative_distance"] = distances[:, None].to(given["relative_distance"].device)
    return (), given


def _bias(module: Any, args: tuple[Any, ...], bias: torch.Tensor) -> torch.Tensor | None:
    """A forward hook of Inkling: the bias `[batch, heads, queries, slots]`, of each row by its own slots."""
    cache = running_cache()
    if cache is None or cache.context is None:
        return None
    states = args[0]
    queries, keys = (slots.to(states.device) for slots in (cache.context.query_slots, cache.context.key_slots))
    return torch.cat([module.forward(states[row : row + 1], queries[row], keys[row]) for row in range(len(states))])
