"""`TreeForward`: runs a model over the nodes of a tree, into a `TreeCache`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from ..attention import TreeContext, implementation_of
from ..attention.kernel import MOST_KERNEL_QUERIES, attends_by_kernel, first_slots_of
from ..cache import TreeCache
from ..states.kernel import MOST_NODES
from .features import Features
from .model_call import ModelCall
from .node_inputs import NodeInputs, is_causal_chain


class TreeForward(ModelCall):
    """
    Runs a model over nodes that follow the committed slots of its cache.

    Args:
        model (`PreTrainedModel`): the target or a draft model.
        cache (`TreeCache`): the model's cache.
        visible (`torch.Tensor` of shape `[batch, prompt]`, bool, *optional*):
            Which of the cache's first slots hold tokens, where some hold padding.
        position_shift (`torch.Tensor`), model_kwargs (`dict`, *optional*), prepares_inputs (`bool`, *optional*),
            encoder_cache (`DynamicCache`, *optional*): see `ModelCall`.
        max_position (`int`, *optional*): the last position that the model knows, to which the larger ones are clamped:
            those of rows that rest, and of nodes that do not count.
        features (`Features`, *optional*): records the model's hidden states.
        shift_of_all (`int`, *optional*): the position shift, if it is known to be equal in all rows. Without it the
            host reads `position_shift`, which synchronizes with the device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        visible: torch.Tensor | None,
        position_shift: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        prepares_inputs: bool = False,
        max_position: int | None = None,
        features: Features | None = None,
        shift_of_all: int | None = None,
        encoder_cache: DynamicCache | None = None,
    ):
        super().__init__(model, cache, position_shift, model_kwargs, prepares_inputs, encoder_cache)
        self.visible, self.max_position, self.features = visible, max_position, features
        self._shift_of_all = _shift_of_all(position_shift) if shift_of_all is None else shift_of_all
        self._first_slots, self.has_kernel = None, self.may_have_kernels and not self.returns_attentions
        self.has_kernel = self.has_kernel and attends_by_kernel(model, implementation_of(model), cache.is_paged)
        if self.has_kernel and visible is not None:
            self._first_slots = first_slots_of(visible)
            self.has_kernel = self._first_slots is not None
        self.has_kernels = self.has_kernel or (not self.takes_mask and self.has_state_kernels)

    has_causal_windows = False
    """Whether layers with a sliding window attend to no node that is deeper than the query; see `TreeContext`."""
    windows_from_root = False
    """Whether sliding windows count from depth 0 at every query; see `TreeContext`. The kernel must be off then."""

    def shift_positions(self, position_shift: torch.Tensor) -> None:
        """Sets the position shift for the forwards that follow, whose rows may be others."""
        self.position_shift, self._shift_of_all = position_shift, _shift_of_all(position_shift)

    def over(self, cache: TreeCache, first_slots: torch.Tensor, position_shift: torch.Tensor) -> TreeForward:
        """
        A copy of this forward over a cache whose lengths only the device knows.

        Args:
            cache (`DevicePagedCache`): the cache.
            first_slots (`torch.Tensor` of shape `[batch]`, int64): the first slot of every row that holds a token.
            position_shift (`torch.Tensor` of shape `[batch]`, int64): position of a token minus its slot, per row.
        """
        forward = copy.copy(self)
        forward.cache, forward._first_slots, forward.visible = cache, first_slots, None
        forward.position_shift, forward._shift_of_all = position_shift, None
        return forward

    def __call__(
        self,
        tokens: torch.Tensor,
        ancestors: torch.Tensor,
        query_depths: torch.Tensor,
        node_depths: torch.Tensor | None = None,
        offset: int = 0,
        position_depths: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        inputs: dict[str, Any] | None = None,
        counts: list[int] | None = None,
        prompt_counts: list[int] | None = None,
    ) -> ModelOutput:
        """
        Runs the model over nodes and writes their K/V into the cache, without committing them.

        Args:
            tokens (`torch.Tensor` of shape `[batch, queries]`, int64): the tokens of the nodes to run.
            ancestors (`torch.Tensor` of shape `[1 or batch, queries, nodes]`, bool): which nodes a query attends to.
            query_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int64): depths of the queries.
            node_depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64, *optional*):
                Depths of all nodes in `ancestors`. Defaults to `query_depths`, where the nodes are the queries.
            offset (`int`, *optional*, defaults to 0): index of the first query among the nodes; its K/V go to slot
                `length + offset`.
            position_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int64, *optional*):
                Depths to take positions from, where they are not `query_depths`.
            logits_to_keep (`int` or `torch.Tensor` of shape `[kept]`, *optional*, defaults to 0):
                How many of the last queries get logits (0: all), or the indices of the queries that get logits
                (without CUDA graphs).
            inputs (`dict[str, torch.Tensor]`, *optional*): keyword arguments for the model instead of `input_ids`.
            counts (`list[int]`, *optional*): for a chain that is a text, how many of the nodes of every row
                `TreeCache.keep_text` will commit.
            prompt_counts (`list[int]`, *optional*): how many of these are of the prompt; all, if None.

        Returns:
            `ModelOutput`: the model's output, with `logits` `[batch, queries, vocab]`.

        Raises:
            ValueError: if the model does not hand `tree_context` to its attention layers.
        """
        cache = self.cache
        uses_kernel = self._may_use_kernel(tokens.shape[1])
        num_slots = cache.write_nodes(offset, tokens.shape[1], in_place=uses_kernel)
        if cache.state_layers:
            cache.follow(ancestors, counts, prompt_counts, by_kernel=self._runs_states_by_kernel(ancestors, counts))
        context = TreeContext(
            lengths=cache.lengths,
            device=cache.device,
            visible=self.visible,
            num_slots=num_slots,
            ancestors=ancestors,
            query_depths=query_depths,
            node_depths=query_depths if node_depths is None else node_depths,
            uniform_length=cache.uniform_length,
            kernel_device=self.device if uses_kernel else None,
            first_slots=self._first_slots,
            lengths_tensor=cache.lengths_tensor if cache.lengths_are_on_device else None,
            block_tables=cache.block_tables,
            has_causal_windows=self.has_causal_windows,
            encoder_cache=self.encoder_cache,
            windows_from_root=self.windows_from_root,
            is_chain=is_causal_chain(ancestors),
        )
        positions = None
        if self.takes_positions:
            positions = self._positions(query_depths if position_depths is None else position_depths)
        nodes = NodeInputs(tokens.to(self.device), positions, logits_to_keep, inputs)
        outputs = None if cache.storage is None else cache.storage.run(self, nodes, context)
        return self.run(nodes, context) if outputs is None else outputs

    def _may_use_kernel(self, queries: int) -> bool:
        """
        Whether layers attend with the kernel in a forward of this many queries: only with CUDA graphs, and if no node
        is padding, as in the prefill of a head.
        """
        if not self.has_kernel or queries > MOST_KERNEL_QUERIES:
            return False
        if self.cache.is_on_device:
            return True
        if self.cache.storage is None:
            return False
        return self.visible is None or self.visible.shape[1] <= min(self.cache.lengths)

    def _runs_states_by_kernel(self, ancestors: torch.Tensor, counts: list[int] | None) -> bool:
        """Whether layers with states run by the kernels: over a whole tree that is small enough, not over a text."""
        queries, nodes = ancestors.shape[1:]
        if not self.has_state_kernels or counts is not None or queries != nodes or nodes > MOST_NODES:
            return False
        return not torch.is_autocast_enabled(self.device.type)

    def _positions(self, depths: torch.Tensor) -> torch.Tensor:
        """Positions of nodes at the given depths, `[…, batch, queries]`."""
        cache = self.cache
        if self._shift_of_all is not None and cache.uniform_length is not None:
            positions = depths + (cache.uniform_length + self._shift_of_all)
            positions = positions.expand(len(cache.lengths), -1).contiguous()  # XGLM takes a view of them
        else:
            positions = cache.lengths_tensor[:, None] + depths + self.position_shift[..., None]
        if self.max_position is not None:
            positions = positions.clamp(max=self.max_position)
        return positions.to(self.device)


def _shift_of_all(position_shift: torch.Tensor) -> int | None:
    """The position shift, if it is equal in all rows; None if rows differ, or have several shifts each."""
    shifts = set(position_shift.tolist()) if position_shift.dim() == 1 else set()
    return shifts.pop() if len(shifts) == 1 else None
