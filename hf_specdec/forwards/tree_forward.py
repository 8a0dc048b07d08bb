"""`TreeForward`: runs a model over the nodes of a tree, into a `TreeCache`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from ..attention import (
    AttentionContext,
    TreeContext,
    implementation_of,
    needs_context,
    obstacle_to_branches,
    obstacle_to_masks,
    supports_switching,
)
from ..attention.kernel import MOST_KERNEL_QUERIES, attends_by_kernel, first_slots_of
from ..cache import TreeCache, beside_encoder
from ..compat import CACHE, cache_argument, cache_name_of
from ..compiling.layers import compiled_layers, compiled_whole
from ..fusing import fused_layers
from ..kernels import DEVICES, kernels_are_installed
from ..models.position_tables import position_table_of, rows_at
from ..models.structure import execution_device, forward_parameters, names_positions, shares_kv, takes_positions
from ..states import is_attention_free, running_over
from ..states.kernel import MOST_NODES
from ..states.served import obstacle_to_kernels
from .features import Features
from .node_inputs import NodeInputs, is_causal_chain


class TreeForward:
    """
    Runs a model over nodes that follow the committed slots of its cache.

    Args:
        model (`PreTrainedModel`): the target or a draft model.
        cache (`TreeCache`): the model's cache.
        visible (`torch.Tensor` of shape `[batch, prompt]`, bool, *optional*):
            Which of the cache's first slots hold tokens, where some hold padding.
        position_shift (`torch.Tensor` of shape `[…, batch]`, int64):
            Position of a token minus its slot, per row; with leading dimensions for models whose positions have
            several.
        model_kwargs (`dict`, *optional*): keyword arguments of the `generate` call that every forward gets.
        prepares_inputs (`bool`, *optional*, defaults to `False`): whether inputs go through the model's
            `prepare_inputs_for_generation`, as in `generate`, or are passed as they are.
        max_position (`int`, *optional*): the last position that the model knows, to which the larger ones are clamped:
            those of rows that rest, and of nodes that do not count.
        features (`Features`, *optional*): records the model's hidden states.
        shift_of_all (`int`, *optional*): the position shift, if it is known to be equal in all rows. Without it the
            host reads `position_shift`, which synchronizes with the device.
        encoder_cache (`DynamicCache`, *optional*): K/V of the call's `encoder_hidden_states`.
    """

    TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

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
        self.model, self.cache, self.visible = model, cache, visible
        self.position_shift, self.max_position, self.features = position_shift, max_position, features
        self._shift_of_all = _shift_of_all(position_shift) if shift_of_all is None else shift_of_all
        self.model_kwargs, self.encoder_cache = dict(model_kwargs or {}), encoder_cache
        self.prepares_inputs = prepares_inputs
        # `device` and `dtype` iterate over the parameters: too slow for every forward.
        self.device, self.dtype = execution_device(model), model.dtype
        self.token_types = {
            name: types[:, -1:] if name == "token_type_ids" else torch.zeros_like(types[:, -1:])
            for name in self.TOKEN_TYPES
            if (types := self.model_kwargs.pop(name, None)) is not None
        }
        # Else the nodes are a chain in one row, which is a text to the model.
        self.takes_masks = obstacle_to_masks(model) is None
        cache.counts_nodes = obstacle_to_branches(model) is not None
        self.switches = supports_switching(model) and self.takes_masks
        # The dense mask is enough for layers without a window, if their implementation takes one.
        self.needs_context = self.switches and needs_context(model)
        parameters = forward_parameters(model)
        self.prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self.takes_positions = takes_positions(model)
        self.position_table = None if names_positions(model) else position_table_of(model)
        # A compiled model's forward names no arguments, and `generate` hands on the cache by the release's own name.
        self.cache_argument = cache_name_of(model) if prepares_inputs else cache_argument(parameters) or CACHE
        # Layers that share K/V would run at fewer positions (see `keeping_one_logit`), which does not suit the mask.
        self.takes_logits_to_keep = "logits_to_keep" in parameters and not shares_kv(model)
        self.without_router_logits = {"output_router_logits": False} if "output_router_logits" in parameters else {}
        """Keyword arguments that keep a mixture of experts from computing its auxiliary loss, which no mask fits."""
        self.takes_mask = not (cache.state_layers and is_attention_free(model))
        """Whether there is attention: other layers would take its mask for one of padding."""
        self.has_state_kernels = bool(cache.state_layers) and obstacle_to_kernels(model) is None
        """Whether kernels compute the states of layers."""
        with_graphs = (self.switches or not self.takes_mask) and cache.storage is not None
        self.fuses = with_graphs and self.dtype in DEVICES.get(self.device.type, ()) and kernels_are_installed()
        """Whether element-wise operations of layers are fused in forwards that are not compiled."""
        self._first_slots, self.has_kernel = None, with_graphs and not self._returns_attentions()
        self.has_kernel = self.has_kernel and attends_by_kernel(model, implementation_of(model), cache.is_paged)
        if self.has_kernel and visible is not None:
            self._first_slots = first_slots_of(visible)
            self.has_kernel = self._first_slots is not None
        self.has_kernels = self.has_kernel or (not self.takes_mask and self.has_state_kernels)
        """Whether kernels run in all layers, so that a whole step can be captured."""
        constants = sorted(self.model_kwargs.items(), key=lambda item: item[0])
        self.can_be_captured = with_graphs and not self.token_types and all(_is_constant(*item) for item in constants)
        self.key = (prepares_inputs, repr(constants)) if self.can_be_captured else None

    def _returns_attentions(self) -> bool:
        """Whether the call wants attention weights, which the kernel does not write."""
        wanted = self.model_kwargs.get("output_attentions")
        return bool(self.model.config.output_attentions if wanted is None else wanted)

    has_causal_windows = False
    """Whether layers with a sliding window attend to no node that is deeper than the query; see `TreeContext`."""
    windows_from_root = False
    """Whether sliding windows count from depth 0 at every query; see `TreeContext`. The kernel must be off then."""
    compiles = False
    """Whether forwards that attend with the kernel run compiled."""
    compiles_layers = False
    """Whether the decoder layers are compiled, for any number of rows and nodes; else the whole model, per shape."""

    adapters: Callable[[int, int], AbstractContextManager[None]] | None = None
    """Makes the context of a forward over so many rows, with so many tokens each, that have adapters of their own."""

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

    def run(self, nodes: NodeInputs, context: AttentionContext) -> ModelOutput:
        """Runs the model's forward without CUDA graphs, after `write_nodes` of the cache."""
        inputs = dict(self.model_kwargs)
        for name, types in self.token_types.items():
            inputs[name] = types.expand(nodes.tokens.shape)
        positions = nodes.positions if self.position_table is None else None
        if positions is not None:
            inputs[f"{self.prefix}position_ids"] = positions
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = nodes.logits_to_keep
        if self.switches:
            inputs["tree_context"] = context
        inputs |= self.without_router_logits | {
            self.cache_argument: beside_encoder(self.cache, self.encoder_cache),
            f"{self.prefix}attention_mask": self._mask(context),
            "use_cache": True,
        }
        if nodes.others is not None:
            inputs |= nodes.others
        elif self.prepares_inputs:
            inputs = self.model.prepare_inputs_for_generation(nodes.tokens, is_first_iteration=False, **inputs)
            if not self.prefix and inputs.get("position_ids") is None and positions is not None:
                inputs["position_ids"] = positions  # the model would count slots; see `Preparation`
            if self.takes_logits_to_keep:
                inputs["logits_to_keep"] = nodes.logits_to_keep  # Bamba and others put their own number there
        else:
            inputs[f"{self.prefix}input_ids"] = nodes.tokens
        model: Any = self.model
        running: AbstractContextManager[None] = fused_layers(self.model) if self.fuses else nullcontext()
        following: AbstractContextManager[None] = (
            running_over(self.cache) if self.cache.state_layers else nullcontext()
        )
        adapted = self._adapted(nodes.tokens)
        if self.compiles and self.has_kernels and (context.uses_kernel or not self.takes_mask):
            if context.uses_kernel:
                _ = context.kernel_inputs  # built before tracing, which could not store it
            if self.compiles_layers:
                running = compiled_layers(self.model, self.cache, context, joins=self._joins_rows(context, adapted))
            model = self.model if self.compiles_layers else compiled_whole(self.model)
        self.cache.context, self.cache.position_shift = context, self.position_shift
        try:
            with running, following, self.at_positions(nodes.positions), adapted:
                outputs = model(**inputs, return_dict=True)
        finally:
            self.cache.context = None  # it holds masks of the whole cache
        if self.cache.kernel_forward is not None:
            self.cache.kernel_forward.end()
        is_for_cache = not outputs  # a head that only fills its cache need not attend
        if self.needs_context and not is_for_cache and not context.was_used:
            raise ValueError(
                f"`assistant_model`: {type(self.model).__name__} does not hand `tree_context` to its attention "
                "layers, or its attention implementation was set during the call. Call `generate` without "
                "`assistant_model`."
            )
        return outputs

    def _joins_rows(self, context: AttentionContext, adapted: AbstractContextManager[None]) -> bool:
        """Whether compiled layers may see all rows as one: nothing but attention by the kernel tells them apart."""
        told_apart = self.cache.state_layers or self.encoder_cache is not None or not isinstance(adapted, nullcontext)
        return context.uses_kernel and not told_apart

    def _adapted(self, tokens: torch.Tensor) -> AbstractContextManager[None]:
        """A context for a forward of these tokens, `[batch, queries]`, with the adapters of its rows."""
        return nullcontext() if self.adapters is None else self.adapters(*tokens.shape)

    def at_positions(self, positions: torch.Tensor | None) -> AbstractContextManager[None]:
        """A context for a forward of tokens at these positions, if the model does not take them as an argument."""
        if self.position_table is None or positions is None:
            return nullcontext()
        return rows_at(self.position_table, positions)

    def _mask(self, context: AttentionContext) -> torch.Tensor | None:
        """The mask that the model is given."""
        if not self.takes_mask:
            return None
        if not self.takes_masks:
            assert isinstance(context, TreeContext)  # forwards of such models are not captured
            return context.padding_mask(self.device)
        return context.model_mask(self.dtype, self.device)

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


def _is_constant(name: str, value: Any) -> bool:
    """Whether a keyword argument is equal at every step and asks for no output besides logits."""
    if name in ("output_attentions", "output_hidden_states"):
        return not value
    return value is None or isinstance(value, bool | int | float | str)
