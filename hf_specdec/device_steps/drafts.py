"""The draft's part of a step on the device: growing a tree, and catching up with what was accepted."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch

from ..attention import mask_values
from ..attention.kernel import first_slots_of
from ..cache import DeviceCache, TreeCache
from ..drafters import Drafter, DraftModelDrafter, EagleDrafter
from ..drafters.growth import Warp, grow, held_levels
from ..forwards.node_inputs import causal_chain
from ..forwards.tree_forward import TreeForward
from ..trees import DraftTree, DynamicTree, TokenTree
from .rows import DeviceRows


class Padding:
    """
    Left padding of a cache's rows, in tensors at fixed addresses.

    Args:
        cache (`TreeCache`): the cache.
        forward (`TreeForward`): a forward of the cache's model.
    """

    def __init__(self, cache: TreeCache, forward: TreeForward):
        device, with_masks = forward.device, not forward.has_kernel
        rows, self._slots = len(cache.lengths), torch.arange(cache.capacity, device=device)
        self.first_slots = torch.zeros(rows, dtype=torch.long, device=device)
        self.position_shift = torch.zeros(rows, dtype=torch.long, device=device)
        shape = (rows, cache.capacity)
        self.visible = torch.ones(shape, dtype=torch.bool, device=device) if with_masks else None
        self.held = mask_values(forward.dtype, device)

    def load(self, forward: TreeForward) -> None:
        """Copies the padding of a call's forward: `visible` and `position_shift` of `TreeForward`."""
        self.position_shift.copy_(forward.position_shift)
        first_slots = None if forward.visible is None else first_slots_of(forward.visible)
        if first_slots is None:
            self.first_slots.zero_()
        else:
            self.first_slots.copy_(first_slots)
        if self.visible is not None:
            self.visible.copy_(self._slots >= self.first_slots[:, None])

    def of(self, forward: TreeForward, cache: DeviceCache) -> TreeForward:
        """The call's forward over a cache whose lengths are known to the device alone, with this padding."""
        return forward.over(cache, self.first_slots, self.visible, self.position_shift)


def is_left_padded(forward: TreeForward) -> bool:
    """Whether the rows of a forward have padding on the left alone, or none."""
    return forward.visible is None or first_slots_of(forward.visible) is not None


class DevicePart(ABC):
    """
    A drafter's part of a step: its state, at fixed addresses, which `load` fills for later calls. A part holds no
    drafter and so keeps no model alive: `bind` makes the drafter that the captured methods run with, from the drafter
    of the capturing call.

    Args:
        drafter (`Drafter`): drafter of a call, after its first `catch_up`.
        tree (`TokenTree` or `DynamicTree`): the tree to grow.
    """

    def __init__(self, drafter: Any, tree: TokenTree | DynamicTree):
        self.tree = tree
        self.cache = DeviceCache(drafter.cache)
        self.padding = Padding(drafter.cache, drafter.forward)
        self.root_logits = drafter.root_logits.clone()
        # Tensors cached per tree elsewhere, held here because a graph reads them for as long as it lives.
        self.held = [held_levels(tree, drafter.device), causal_chain(tree.depth + 1, drafter.device)]

    def bind(self, drafter: Any) -> Any:
        """A copy of the drafter whose forwards use the cache and padding of this part."""
        bound = copy.copy(drafter)
        bound.forward = self.padding.of(drafter.forward, self.cache)
        return bound

    def load(self, drafter: Any) -> None:
        """Copies the state of a call's drafter."""
        self.padding.load(drafter.forward)
        self.root_logits.copy_(drafter.root_logits)

    def room(self, drafter: Any, rows: DeviceRows) -> torch.Tensor:
        """Levels of draft tokens that each row can use, `[batch]` int64."""
        return rows.room()

    @abstractmethod
    def grow(self, drafter: Any, rows: DeviceRows, warp: Warp | None) -> DraftTree:
        """Grows the tree below the roots; `warp` makes the scores of q if children are drawn, see `growth.grow`."""

    @abstractmethod
    def catch_up(self, drafter: Any, rows: DeviceRows, lengths: torch.Tensor, features: torch.Tensor | None) -> None:
        """
        Forwards the tokens that a step has appended.

        Args:
            rows (`DeviceRows`): state of the rows after the step.
            lengths (`torch.Tensor` of shape `[batch]`, int64): tokens of every row before the step.
            features (`torch.Tensor` of shape `[batch, depth + 1, size]`, *optional*): the target's features of the
                root and the accepted nodes.
        """


class ModelPart(DevicePart):
    """A draft model's part of a step; its cache holds all tokens, the root included."""

    def room(self, drafter: DraftModelDrafter, rows: DeviceRows) -> torch.Tensor:
        """Levels of draft tokens that each row can use, also within the positions that the draft model knows."""
        room = super().room(drafter, rows)
        if drafter.max_positions is None:
            return room
        return torch.minimum(room, drafter.max_positions - rows.lengths - self.padding.position_shift)

    def grow(self, drafter: DraftModelDrafter, rows: DeviceRows, warp: Warp | None) -> DraftTree:
        self.cache.at(rows.lengths)
        draft = grow(self.tree, self.root_logits, drafter.run_level, self.tree.depth, warp)
        return drafter.after_known(draft, rows.roots())

    def catch_up(
        self, drafter: DraftModelDrafter, rows: DeviceRows, lengths: torch.Tensor, features: torch.Tensor | None
    ) -> None:
        tokens = rows.tokens_after(lengths, self.tree.depth + 1)
        self.cache.at(lengths)
        logits = drafter.forward(tokens, *causal_chain(tokens.shape[1], tokens.device)).logits
        last = (rows.lengths - lengths - 1).clamp(min=0)
        self.root_logits.copy_(logits[torch.arange(len(last), device=last.device), last])


class HeadPart(DevicePart):
    """An EAGLE head's part of a step; its cache pairs every token after `drafter.first` with the feature before it."""

    def __init__(self, drafter: EagleDrafter, tree: TokenTree | DynamicTree):
        super().__init__(drafter, tree)
        self.root_states = drafter.root_states.clone()
        self.num_missing = torch.zeros(1, dtype=torch.long, device=drafter.device)
        """Number of tokens of a row minus its number of rows in the cache, `[1]` int64."""
        self.held += [drafter.held_rows, drafter.target_ids]

    def load(self, drafter: EagleDrafter) -> None:
        super().load(drafter)
        self.root_states.copy_(drafter.root_states)
        self.num_missing.fill_(1 + drafter.first)

    def grow(self, drafter: EagleDrafter, rows: DeviceRows, warp: Warp | None) -> DraftTree:
        drafter.states = self.root_states
        self.cache.at(rows.lengths - self.num_missing)
        draft = grow(self.tree, self.root_logits, drafter.run_level, self.tree.depth, warp)
        return draft.in_vocabulary(drafter.target_ids, drafter.request.vocab_size)

    def catch_up(
        self, drafter: EagleDrafter, rows: DeviceRows, lengths: torch.Tensor, features: torch.Tensor | None
    ) -> None:
        assert features is not None  # a head's call always records features
        tokens = rows.tokens_after(lengths, self.tree.depth + 1)
        self.cache.at(lengths - self.num_missing)
        states = drafter.forward_features(tokens, features.to(drafter.head.dtype))
        last = (rows.lengths - lengths - 1).clamp(min=0)
        self.root_states.copy_(states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])))
        self.root_logits.copy_(drafter.logits(self.root_states)[:, 0])


PARTS: dict[type[Drafter], type[DevicePart]] = {DraftModelDrafter: ModelPart, EagleDrafter: HeadPart}
"""Part of a step, by exact type of drafter. Subclasses of drafters have no part, because they may do anything."""
