"""What a probe finds of a model's layers: what they cache, and how they attend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class CachedLayer:
    """
    Keys and values that one layer writes to a cache.

    Args:
        key, value (`tuple[int, int]`): heads, and elements of a head, of one token.
        key_dtype, value_dtype (`torch.dtype`): their dtypes.
        device (`torch.device`): where they are computed.
        index (`tuple[int, int]`, *optional*): heads, and elements of a head, of the keys of the layer's indexer.
        index_dtype (`torch.dtype`, *optional*): their dtype.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device
    index: tuple[int, int] | None = None
    index_dtype: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of one token."""
        key, value = (heads * size for heads, size in (self.key, self.value))
        num_bytes = key * self.key_dtype.itemsize + value * self.value_dtype.itemsize
        if self.index is not None and self.index_dtype is not None:
            num_bytes += self.index[0] * self.index[1] * self.index_dtype.itemsize
        return num_bytes


@dataclass(frozen=True)
class CachedStates:
    """
    The recurrent and convolutional states that one layer keeps of a text.

    Args:
        tensors (`tuple`): shape without the batch, and dtype, of each.
        device (`torch.device`): where they are computed.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one text, of any length."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """
    One layer's call of the attention function.

    Args:
        module (`nn.Module`): the shadow of the layer.
        query, key, value (`tuple[int, int]`): heads, and elements of a head.
        reads_cache (`bool`): whether keys and values are those that the cache gave, as they are.
        makes_mask (`bool`): whether the mask is not the one that the model was given.
        options (`dict`): the keyword arguments that are not None.
    """

    module: nn.Module
    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    reads_cache: bool
    makes_mask: bool
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Layers:
    """
    What the layers of a model were seen to do.

    Args:
        cached (`dict[int, CachedLayer]`): what is cached, by index of the cache's layer.
        calls (`list[AttentionCall]`): the calls of the attention function, in order.
        states (`dict[int, CachedStates]`): the states that are kept, by index of the cache's layer.
        hands_on_context (`bool`): for a model with states: whether all attention layers got the `tree_context` that
            its forward was given.
    """

    cached: dict[int, CachedLayer]
    calls: list[AttentionCall]
    states: dict[int, CachedStates] = field(default_factory=dict)
    hands_on_context: bool = False
