"""Keys of a layer's indexer, which a layer with selected keys caches beside keys and values."""

from __future__ import annotations

import torch

from .parts import CacheT, PartOfCache


class HoldsIndexKeys(PartOfCache[CacheT]):
    """
    A cache layer that may hold the keys of an indexer, too. They are written before the layer's K/V or after, to the
    same slots, and move with them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    index_keys: torch.Tensor | None = None
    """The keys, in the layout of `keys`; None before an indexer has written any."""

    positions: torch.Tensor | None = None
    """Positions of the slots that plain forwards have written, `[axes, batch, slots]`; see `indexer_position_ids`."""

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """
        Positions of all slots, `[3, batch, slots]` int64, that Qwen4 puts its nodes' own behind, `[3, batch, nodes]`,
        and sets here. In forwards over a tree they are those of the nodes' texts, and are not set.
        """
        cache = self.cache
        return self.positions if cache.context is None else self.positions_of(cache.context.key_slots)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        if self.cache.context is None:
            self.positions = positions

    def positions_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Positions of slots, counted along the text of each row, `[3, batch, slots]` int64."""
        positions = slots + self.cache.position_shift[..., None].to(slots.device)
        positions = positions if positions.dim() == 3 else positions[None]
        # Of several axes the last three count: one for the text may come before.
        positions = positions[-3:] if len(positions) >= 3 else positions[-1:].expand(3, -1, -1)
        if self.positions is None:
            return positions
        return torch.cat([self.positions, positions[:, :, self.positions.shape[2] :]], dim=2)

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
        Writes the keys of an indexer, `[batch, heads, nodes, dim]`, to the slots of the forward's K/V.
        Returns those of all slots up to the last one written, `[batch, heads, slots, dim]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `update_index`.")

    def held_index(self) -> torch.Tensor:
        """All memory of the indexer's keys, in the layout of `keys`."""
        if self.index_keys is None:
            raise RuntimeError("No indexer has written keys to this layer: there is nothing to read.")
        return self.index_keys

    def read_index(self) -> torch.Tensor:
        """The keys of the indexer in all slots up to the last one written, `[batch, heads, slots, dim]`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `read_index`.")
