"""States after every node of a tree, for mixers that run level by level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from ..states import Path


if TYPE_CHECKING:
    from .tree_cache import TreeCache


class NodeStatesLayer(LinearAttentionLayer):
    """The states of a layer in the rows of a cache, and after the nodes of a step where mixers run level by level."""

    cache: TreeCache
    index: int
    device: Any
    dtype: Any
    after_nodes: dict[tuple[str, int], torch.Tensor]
    """States after the nodes, `[batch, nodes, …]`, by the name of the states and their number."""

    def _hold_window(self, window: torch.Tensor, number: int) -> None:
        if self.device is None:
            self.dtype, self.device = window.dtype, window.device
        self.conv_states[number] = self.cache.place_states((self.index, number, "window"), window)
        self.conv_kernel_size[number], self.is_conv_states_initialized[number] = window.shape[-1], True

    def _hold_state(self, state: torch.Tensor, number: int) -> None:
        self.recurrent_states[number] = self.cache.place_states((self.index, number, "state"), state)
        self.is_recurrent_states_initialized[number] = True

    def _of_rows(self, states: torch.Tensor) -> torch.Tensor:
        rows = self.cache.state_rows
        return states if rows is None else states[rows.to(states.device)]

    def _write(self, states: torch.Tensor, new: torch.Tensor) -> None:
        rows = self.cache.state_rows
        if rows is None:
            states.copy_(new)
        else:
            states[rows.to(states.device)] = new.to(states.dtype)

    def begin_step(self) -> None:
        """Forgets what nodes have added that were not committed."""
        self.after_nodes.clear()

    def states_after(
        self, kind: str, number: int, rows: torch.Tensor, nodes: torch.Tensor | None
    ) -> torch.Tensor | None:
        """
        States of some rows after a node each, `[rows, …]`; after the committed tokens, where a node is -1, or all are
        None. None, if there are no such states.
        """
        held = getattr(self, kind)[number]
        if held is None:
            return None
        rows = rows.to(held.device)
        committed, after = self._of_rows(held)[rows], self.after_nodes.get((kind, number))
        if nodes is None or after is None:
            return committed
        nodes = nodes.to(held.device)
        is_node = (nodes >= 0).view(-1, *[1] * (committed.dim() - 1))
        return torch.where(is_node, after[rows, nodes.clamp(min=0)], committed)

    def keep_states(
        self, kind: str, number: int, rows: torch.Tensor, places: torch.Tensor, states: torch.Tensor
    ) -> None:
        """Takes the states of some rows after a node each, at these places among the nodes, until `settle`."""
        topology, batch = self.cache.nodes, len(self.cache.lengths)
        if getattr(self, kind)[number] is None:
            new = states.new_zeros(self.cache.num_states or batch, *states.shape[1:])
            (self._hold_window if kind == "conv_states" else self._hold_state)(new, number)
        committed, after = self._of_rows(getattr(self, kind)[number]), self.after_nodes.get((kind, number))
        wanted = 1 if topology.counts is not None else topology.offset + topology.num_queries
        known = 0 if after is None else after.shape[1]
        if known < wanted:
            new = committed[:, None].repeat_interleave(wanted - known, dim=1)
            after = new if after is None else torch.cat([after, new], dim=1)
        assert after is not None
        after[rows.to(after.device), places.to(after.device)] = states.to(after.dtype)
        self.after_nodes[kind, number] = after

    def settle_nodes(self, path: Path) -> None:
        """Commits the states after the last node of a path in every row."""
        for (kind, number), after in self.after_nodes.items():
            own = path.to(after.device)
            last = own.nodes.gather(1, (own.is_on.sum(dim=1, keepdim=True) - 1).clamp(min=0))
            rows, moved = torch.arange(len(after), device=after.device), own.is_on.any(dim=1)
            held = getattr(self, kind)[number]
            moved = moved.view(-1, *[1] * (after.dim() - 2))
            self._write(held, torch.where(moved, after[rows, last[:, 0]], self._of_rows(held)))
        self.after_nodes.clear()
