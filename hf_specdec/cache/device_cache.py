"""Caches whose lengths only the device knows, for steps that run without the host."""

from __future__ import annotations

import torch

from .layers import WriteWindow
from .tree_cache import TreeCache


class LengthsOnDevice:
    """Mixin of caches whose lengths only the device knows."""

    lengths_are_on_device = is_on_device = True
    _lengths_tensor: torch.Tensor | None

    @property
    def uniform_length(self) -> None:
        """None: the host does not know the lengths."""
        return None

    def at(self, lengths: torch.Tensor) -> None:
        """Sets the number of committed slots of every row, `[batch]` int64, for the following forwards."""
        self._lengths_tensor = lengths


class DeviceCache(LengthsOnDevice, TreeCache):
    """
    The K/V memory of another cache, with lengths that only the device knows: for steps that run without the host. All
    slots are allocated already, and only tree forwards use this cache.

    Args:
        source (`TreeCache`): the cache that owns the K/V, after its prefill.
    """

    def __init__(self, source: TreeCache):
        super().__init__(len(source.layers), len(source.lengths), source.device, source.capacity)
        for layer, held in zip(self.layers, source.layers, strict=True):
            layer.keys, layer.values, layer.is_initialized = held.keys, held.values, held.is_initialized
            if held.is_initialized:
                layer.dtype, layer.device = held.dtype, held.device

    def write_nodes(self, offset: int, num_nodes: int, in_place: bool = True) -> None:
        nodes = torch.arange(offset, offset + num_nodes, device=self.device)
        self.write_window = WriteWindow(None, self.capacity, self.lengths_tensor[:, None] + nodes)
