"""`ModelCall`: calls a model over a cache, with the arguments that its forward takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from ..attention import (
    AttentionContext,
    TreeContext,
    needs_context,
    obstacle_to_branches,
    obstacle_to_masks,
    supports_switching,
)
from ..cache import TreeCache
from ..compat import CACHE, cache_argument, cache_name_of
from ..compiling.layers import compiled_layers, compiled_whole
from ..fusing import fused_layers, own_layers
from ..kernels import DEVICES, kernels_are_installed
from ..models.position_tables import position_table_of, rows_at
from ..models.structure import (
    execution_device,
    forward_parameters,
    keeping_one_logit,
    names_positions,
    shares_kv,
    takes_positions,
)
from ..states import is_attention_free, running_over
from ..states.served import obstacle_to_kernels
from .node_inputs import NodeInputs


class ModelCall:
    """
    Calls a model over a cache: over the nodes of a tree, or over prompts as it would read them anyway.

    Args:
        model (`PreTrainedModel`): the target or a draft model.
        cache (`TreeCache`): the model's cache.
        position_shift (`torch.Tensor` of shape `[…, batch]`, int64): position of a token minus its slot, per row; with
            leading dimensions for models whose positions have several.
        model_kwargs (`dict`, *optional*): keyword arguments of the `generate` call that every forward gets.
        prepares_inputs (`bool`, *optional*, defaults to `False`): whether inputs go through the model's
            `prepare_inputs_for_generation`, as in `generate`, or are passed as they are.
        encoder_cache (`DynamicCache`, *optional*): K/V of the call's `encoder_hidden_states`.
    """

    TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

    has_kernels = False
    """Whether kernels run in all layers, so that a whole step can be captured."""
    compiles = False
    """Whether forwards that attend with the kernel run compiled."""
    compiles_layers = False
    """Whether the decoder layers are compiled, for any number of rows and nodes; else the whole model, per shape."""

    adapters: Callable[[int, int], AbstractContextManager[None]] | None = None
    """Makes the context of a forward over so many rows, with so many tokens each, that have adapters of their own."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        position_shift: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        prepares_inputs: bool = False,
        encoder_cache: DynamicCache | None = None,
    ):
        self.model, self.cache, self.position_shift = model, cache, position_shift
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
        self.may_have_kernels = (self.switches or not self.takes_mask) and cache.storage is not None
        """Whether kernels may run in the model's layers, and graphs be captured, as far as this call goes."""
        self.fuses = (
            self.may_have_kernels and self.dtype in DEVICES.get(self.device.type, ()) and kernels_are_installed()
        )
        """Whether element-wise operations of layers are fused in forwards that are not compiled."""
        constants = sorted(self.model_kwargs.items(), key=lambda item: item[0])
        self.can_be_captured = (
            self.may_have_kernels and not self.token_types and all(_is_constant(*item) for item in constants)
        )
        self.key = (prepares_inputs, repr(constants)) if self.can_be_captured else None

    @property
    def returns_attentions(self) -> bool:
        """Whether the call wants attention weights, which the kernel does not write."""
        wanted = self.model_kwargs.get("output_attentions")
        return bool(self.model.config.output_attentions if wanted is None else wanted)

    def prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor | None = None,
        chunk_size: int | None = None,
    ) -> None:
        """
        Reads prompts by plain causal forwards, of which no logits are needed, and commits them in the empty cache.

        Args:
            ids (`torch.Tensor` of shape `[batch, prompt]`, int64): the prompts.
            positions (`torch.Tensor` of shape `[batch, prompt]`, int64): their positions.
            visible (`torch.Tensor` of shape `[batch, prompt]`, bool, *optional*): which tokens are no padding.
            chunk_size (`int`, *optional*): tokens per forward; all by default.
        """
        # A model without attention reads one mask with all tokens, and counts no chunk of one token.
        chunk_size = (None if is_attention_free(self.model) else chunk_size) or ids.shape[1]
        inputs = self.model_kwargs | keeping_one_logit(self.model) | self.without_router_logits
        inputs |= {self.cache_argument: self.cache.beside(self.encoder_cache), "use_cache": True}
        for start in range(0, ids.shape[1], chunk_size):
            chunk = slice(start, start + chunk_size)
            inputs[f"{self.prefix}input_ids"], at = ids[:, chunk], positions[:, chunk]
            if self.takes_positions and self.position_table is None:
                inputs[f"{self.prefix}position_ids"] = at
            if visible is not None:
                inputs[f"{self.prefix}attention_mask"] = visible[:, : chunk.stop].long()
            with running_over(self.cache), self.at_positions(at):
                self.model(**inputs, return_dict=True)
        self.cache.adopt_prefill()

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
            self.cache_argument: self.cache.beside(self.encoder_cache),
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
        running: AbstractContextManager[None] = nullcontext()
        layers = fused_layers(self.model) if self.fuses else nullcontext()
        following: AbstractContextManager[None] = (
            running_over(self.cache) if self.cache.state_layers else nullcontext()
        )
        adapted = self._adapted(nodes.tokens)
        if self.compiles and self.has_kernels and (context.uses_kernel or not self.takes_mask):
            if context.uses_kernel:
                _ = context.kernel_inputs  # built before tracing, which could not store it
            layers = own_layers(self.model)
            if self.compiles_layers:
                running = compiled_layers(self.model, self.cache, context, joins=self._joins_rows(context, adapted))
            model = self.model if self.compiles_layers else compiled_whole(self.model)
        self.cache.context, self.cache.position_shift = context, self.position_shift
        try:
            with layers, running, following, self.at_positions(nodes.positions), adapted:
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


def _is_constant(name: str, value: Any) -> bool:
    """Whether a keyword argument is equal at every step and asks for no output besides logits."""
    if name in ("output_attentions", "output_hidden_states"):
        return not value
    return value is None or isinstance(value, bool | int | float | str)
