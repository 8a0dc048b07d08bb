"""`TreeContext`: what the queries of a forward over a tree attend to, as dense masks or as inputs of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import Cache

from .kernel import NODES_PER_WORD, KernelInputs


if TYPE_CHECKING:
    from ..compiling.one_row import OneRow


class AttentionContext(Protocol):
    """What attention layers read in a forward over a tree: a `TreeContext`, or that of a captured forward."""

    was_used: bool
    """Whether an attention layer has read the context."""
    one_row: OneRow | None
    """While layers run compiled, and attend by the kernel: the rows of what they hand to attention."""

    @property
    def uses_kernel(self) -> bool:
        """Whether layers attend with the tree-attention kernel."""

    @property
    def kernel_inputs(self) -> KernelInputs | None:
        """The tree-attention kernel's arguments; None where layers attend with a mask."""

    def mask(
        self, dtype: torch.dtype, device: torch.device, window: int | None = None, chunk: int | None = None
    ) -> torch.Tensor:
        """The additive mask `[1 or batch, 1, queries, slots]`, of a layer with this sliding window or these chunks."""

    def model_mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mask that the model itself is given."""


@dataclass(eq=False)
class TreeContext:
    """
    Attention context of one tree forward: what its queries may attend to. Queries are nodes; keys are the slots of a
    `TreeCache`: the committed slots of the query's row, followed by the slots of the tree's nodes.

    Args:
        lengths (`list[int]`): number of committed slots of every row.
        device (`torch.device`): device on which masks and lengths are computed.
        visible (`torch.Tensor` of shape `[batch, prompt]`, bool, *optional*): which of the first slots hold tokens,
            where some hold padding.
        num_slots (`int`): number of slots (keys) that the forward sees.
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, nodes]`, bool): which nodes a query may attend to.
        query_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int64): depth of every query; depth 0 is the
            position right after the committed slots.
        node_depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): depth of every node after the committed
            slots.
        uniform_length (`int`, *optional*): number of committed slots, if it is equal in all rows.
        kernel_device (`torch.device`, *optional*): device on which layers attend with the tree-attention kernel, which
            needs no mask; None: layers attend with a mask.
        first_slots (`torch.Tensor` of shape `[batch]`, int64, *optional*): for the kernel, the first slot of every row
            that holds a token.
        node_multiple (`int`): for the kernel, the number of nodes is padded to a multiple of this.
        lengths_tensor (`torch.Tensor` of shape `[batch]`, int64, *optional*): number of committed slots of every row,
            if the cache has it on the device. Where only the device knows it, `lengths` is good for its size alone.
        block_tables (`torch.Tensor` of shape `[batch, blocks]`, int64, *optional*): for the kernel, the block table of
            every row of a paged cache.
        has_causal_windows (`bool`): whether layers with a sliding window attend to no node that is deeper than the
            query, although `ancestors` may allow it.
        windows_from_root (`bool`): whether layers with a sliding window attend, at every query, to the keys from the
            window's width before depth 0 on; else a window counts from each query. Not for the kernel.
        encoder_cache (`Cache`, *optional*): K/V of the call's `encoder_hidden_states`, which all nodes attend to.
        is_chain (`bool`): whether the nodes are known to be a chain, all of which the queries are.
    """

    lengths: list[int]
    device: torch.device
    visible: torch.Tensor | None
    num_slots: int
    ancestors: torch.Tensor
    query_depths: torch.Tensor
    node_depths: torch.Tensor
    uniform_length: int | None = None
    kernel_device: torch.device | None = None
    first_slots: torch.Tensor | None = None
    node_multiple: int = 1
    lengths_tensor: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    has_causal_windows: bool = False
    windows_from_root: bool = False
    encoder_cache: Cache | None = None
    is_chain: bool = False
    was_used: bool = False
    one_row: OneRow | None = field(default=None, init=False, repr=False)
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)
    _kernel_inputs: KernelInputs | None = field(default=None, repr=False)

    def over(self, num_slots: int, node_multiple: int = NODES_PER_WORD) -> TreeContext:
        """
        A copy for a forward that sees `num_slots` slots, of which those after the nodes are masked out. The number of
        nodes is padded to a multiple of `node_multiple`, so that the levels of a tree can share a captured graph.
        """
        return replace(
            self, num_slots=num_slots, node_multiple=node_multiple, was_used=False, _masks={}, _kernel_inputs=None
        )

    @property
    def uses_kernel(self) -> bool:
        """Whether layers attend with the tree-attention kernel."""
        return self.kernel_device is not None

    @property
    def kernel_inputs(self) -> KernelInputs | None:
        """The tree-attention kernel's arguments for this forward, built on first use; None without the kernel."""
        if self._kernel_inputs is None and self.kernel_device is not None:
            self._kernel_inputs = self._make_kernel_inputs().to(self.kernel_device)
        return self._kernel_inputs

    def _make_kernel_inputs(self) -> KernelInputs:
        return KernelInputs.of(
            torch.tensor(self.lengths, device="cpu") if self.lengths_tensor is None else self.lengths_tensor,
            self.ancestors,
            self.query_depths,
            self.node_depths,
            self.first_slots,
            self.node_multiple,
            self.block_tables,
            self.has_causal_windows,
        )

    def model_mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mask that the model itself is given: `mask`, or unused zeros where layers attend with the kernel."""
        if not self.uses_kernel:
            # A row's own, as `generate` makes it: attention of a model's own may insist on that shape.
            return self.mask(dtype, device).expand(len(self.lengths), -1, -1, -1)
        shape = (len(self.lengths), 1, self.ancestors.shape[1], self.num_slots)
        return torch.zeros(1, 1, 1, 1, dtype=dtype, device=device).expand(shape)

    def padding_mask(self, device: torch.device) -> torch.Tensor:
        """Which keys are tokens, and no padding, `[batch, slots]` int64: the mask of a text."""
        mask = torch.ones(len(self.lengths), self.num_slots, dtype=torch.long, device=device)
        if self.visible is not None:
            mask[:, : self.visible.shape[1]] = self.visible
        return mask

    def mask(
        self, dtype: torch.dtype, device: torch.device, window: int | None = None, chunk: int | None = None
    ) -> torch.Tensor:
        """
        The additive mask `[1 or batch, 1, queries, slots]`: 0 where a query may attend, else the lowest value of
        `dtype`.

        Args:
            window (`int`, *optional*): a query attends to keys less than this many positions before it.
            chunk (`int`, *optional*): a query attends to keys of its own chunk of so many positions, counted from the
                first token of the row.
        """
        key = (dtype, device, window, chunk)
        if key not in self._masks and window is None and chunk is None and self._sees_all:
            self._masks[key] = torch.zeros(1, 1, self.ancestors.shape[1], self.num_slots, dtype=dtype, device=device)
        elif key not in self._masks:
            allowed = self._allowed
            if window is not None:
                in_window = -self._nodes[:, None] <= window if self.windows_from_root else self._distances < window
                allowed = allowed & in_window
            if window is not None and self.has_causal_windows:
                allowed = allowed & (self._distances >= 0)
            if chunk is not None:
                pads = self._num_pads[:, None]
                queries, keys = ((slots - pads) // chunk for slots in (self.query_slots, self.key_slots))
                allowed = allowed & (keys[:, None] == queries[:, :, None])
            self._masks[key] = torch.where(allowed[:, None], *mask_values(dtype, allowed.device)).to(device)
        return self._masks[key]

    @cached_property
    def query_slots(self) -> torch.Tensor:
        """The slots that the queries take if they are accepted, `[batch, queries]` int64."""
        return self._row_lengths[:, None] + self.query_depths

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """The slots that the keys have, or take if they are accepted, `[batch, slots]` int64."""
        return self._row_lengths[:, None] + self._depths

    @cached_property
    def nodes_are_in_order(self) -> bool:
        """Whether the nodes lie in the order of the only text that they write, as those of a chain do."""
        num_nodes = self.node_depths.shape[1]
        return bool((self.node_depths == torch.arange(num_nodes, device=self.device)).all())

    @cached_property
    def slots_of_paths(self) -> torch.Tensor:
        """
        The keys of every query in the order of its own text, `[batch, queries, slots]` int64: the slots of the
        committed tokens, then those of the nodes above the query by their depth. Slots past the query's own are any.
        """
        depths = torch.arange(1 + int(self.node_depths.max()), device=self.device)
        if self.nodes_are_in_order:
            nodes = depths.expand(1, self.ancestors.shape[1], -1)
        else:
            at_depth = self.node_depths[:, None, :, None] == depths
            nodes = (self.ancestors[..., None] & at_depth).int().argmax(dim=2)  # [1 or batch, queries, depths]
        lengths = self._row_lengths[:, None, None]
        slots = torch.arange(max(self.lengths) + len(depths), device=self.device).expand(
            len(self.lengths), nodes.shape[1], -1
        )
        above = (slots - lengths).clamp(0, len(depths) - 1)
        nodes = nodes.expand(len(self.lengths), -1, -1).gather(2, above)
        return torch.where(slots < lengths, slots, lengths + nodes)

    @cached_property
    def _num_pads(self) -> torch.Tensor:
        """Slots before the first token of every row, `[batch]` int64."""
        if self.visible is None:
            return torch.zeros_like(self._row_lengths)
        return (self.visible.cumsum(dim=1) == 0).sum(dim=1)

    @property
    def is_new_text(self) -> bool:
        """Whether the nodes are the first tokens of every row: causal attention over them needs no mask."""
        return self.is_chain and self.uniform_length == 0 and self.visible is None

    @property
    def _sees_all(self) -> bool:
        """Whether a single query attends to every slot: the level of a chain, or a step without a tree."""
        if self.ancestors.shape[1] > 1 or self.uniform_length is None or self.visible is not None:
            return False
        if self.num_slots > self.uniform_length + self.ancestors.shape[2]:
            return False
        return self.ancestors.device.type == "cpu" and bool(self.ancestors.all())  # elsewhere it would synchronize

    @cached_property
    def _allowed(self) -> torch.Tensor:
        """Which slots a query may attend to, `[1 or batch, queries, slots]` bool."""
        queries, num_nodes = self.ancestors.shape[1:]
        if self.uniform_length is not None and self.visible is None:
            num_later = self.num_slots - self.uniform_length - num_nodes
            ancestors = (
                torch.nn.functional.pad(self.ancestors, (0, num_later), value=False) if num_later else self.ancestors
            )
            return torch.nn.functional.pad(ancestors, (self.uniform_length, 0), value=True)
        rows = len(self.lengths)
        nodes = self._nodes[:, None].expand(rows, queries, self.num_slots)
        in_tree = self.ancestors.expand(rows, -1, -1).gather(2, nodes.clamp(0, num_nodes - 1))
        allowed = (nodes < 0) | (in_tree & (nodes >= 0) & (nodes < num_nodes))
        if self.visible is None:
            return allowed
        # Nodes may be padding, too: in the prefill of a head, whose nodes are the prompt's tokens.
        visible = torch.nn.functional.pad(
            self.visible, (0, max(self.num_slots - self.visible.shape[1], 0)), value=True
        )
        return allowed & visible[:, None, : self.num_slots]

    @cached_property
    def _nodes(self) -> torch.Tensor:
        """Index of the node in every slot, `[batch, slots]` int64; negative for committed slots."""
        return torch.arange(self.num_slots, device=self.device) - self._row_lengths[:, None]

    @cached_property
    def _row_lengths(self) -> torch.Tensor:
        """Number of committed slots of every row, `[batch]` int64."""
        return torch.tensor(self.lengths, device=self.device) if self.lengths_tensor is None else self.lengths_tensor

    @cached_property
    def _distances(self) -> torch.Tensor:
        """Position of the query minus position of the key, `[batch, queries, slots]` int64."""
        return self.query_depths[:, :, None] - self._depths[:, None]

    @cached_property
    def _depths(self) -> torch.Tensor:
        """Position of the key after the committed slots, `[batch, slots]` int64; negative for committed slots."""
        rows = len(self.lengths)
        depths = self.node_depths.expand(rows, -1).gather(1, self._nodes.clamp(0, self.node_depths.shape[1] - 1))
        return torch.where(self._nodes < 0, self._nodes, depths)


@lru_cache(maxsize=16)
def mask_values(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of an additive mask for allowed and for hidden slots."""
    return torch.zeros((), dtype=dtype, device=device), torch.full(
        (), torch.finfo(dtype).min, dtype=dtype, device=device
    )
