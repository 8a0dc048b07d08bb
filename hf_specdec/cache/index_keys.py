"""Keys of a layer's indexer, which a layer with selected keys caches beside keys and values."""

from __future__ import annotations

import torch


class HoldsIndexKeys:
    """
    A cache layer that may hold the keys of an indexer, too. They are written after the layer's K/V, to the same slots,
    and move with them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    index_keys: torch.Tensor | None = None
    """The keys, in the layout of `keys`; None before an indexer has written any."""

    @property
    def states(self) -> list[torch.Tensor]:
        """All that the layer holds of its slots: keys, values, and the keys of an indexer if there are any."""
        return [self.keys, self.values] + ([] if self.index_keys is None else [self.index_keys])

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """
        Writes the keys of an indexer with one head, `[batch, nodes, dim]`, and returns those of all slots, as
        transformers' `DynamicIndexedLayer` does.
        """
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, index_keys: torch.Tensor) -> torch.Tensor:
        """
        Writes the keys of an indexer, `[batch, heads, nodes, dim]`, to the slots of the K/V that were written last.
        Returns those of all slots up to the last one written, `[batch, heads, slots, dim]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `update_index`.")

    def read_index(self) -> torch.Tensor:
        """The keys of the indexer in all slots up to the last one written, `[batch, heads, slots, dim]`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `read_index`.")
