"""
"tree_attention": attention over a tree of draft tokens, registered with transformers as attention and mask function.

While a call speculates, its models use "tree_attention" instead of their own implementation. A forward that carries a
`TreeContext` attends along the tree; every other forward (prefill, other threads) falls through to the model's own
implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..compat import INDEXED
from .context import AttentionContext
from .functions import attention_function, grouped_attention, implementation_over_trees, kernel_options
from .selection import factors_of_slots, kind_of, selects, with_own_mask, with_selection
from .switch import NAME, PARTIAL_KINDS, previous_implementation


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree_context: AttentionContext | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The registered attention function (transformers' `AttentionInterface`). Without a `tree_context` it is the
    function that the model had before its attention was switched.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, nodes, head_dim]`): queries of the nodes.
        key, value (`torch.Tensor` of shape `[batch, kv_heads, slots, head_dim]`): committed slots, then the nodes.
        attention_mask (`torch.Tensor`, *optional*): the model's mask; of forwards with a `tree_context` only that of
            layers that select keys by it.
        tree_context (`AttentionContext`, *optional*): what the nodes attend to.

    Returns:
        `tuple`: the attended values, `[batch, nodes, heads, head_dim]`, and the attention weights, if the function
        gives any.
    """
    attend = _attend if tree_context is None or tree_context.one_row is None else _attend_apart
    return attend(module, query, key, value, attention_mask, tree_context, **kwargs)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree_context: AttentionContext | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    config: Any = module.config
    implementation = previous_implementation(config)
    if tree_context is None or _is_of_encoder(key, tree_context):
        if implementation in ("eager", "sdpa") and selects(kwargs):
            attention_mask = with_selection(module, attention_mask, query, key, kwargs)
        function = attention_function(implementation, module)
        return function(_AsBefore(module, implementation), query, key, value, attention_mask, **kwargs)
    tree_context.was_used = True
    implementation, window = implementation_over_trees(implementation, kwargs), layer_window(module, kwargs)
    inputs = tree_context.kernel_inputs
    if inputs is not None:
        return inputs.attend(query, key, value, window=window, **kernel_options(implementation, kwargs)), None
    factors, bias = factors_of_slots(module, query.shape[2], kwargs, tree_context), kwargs.pop("position_bias", None)
    if factors is not None:
        factors = factors[:, None, :, None].to(query.device)
        query, bias = (query * factors).to(query.dtype), None if bias is None else (bias * factors).to(bias.dtype)
    kind, own_mask = kind_of(module), attention_mask
    if implementation == "sdpa" and factors is None and bias is None and kind not in PARTIAL_KINDS:
        if _is_causal(module, query, key, window, tree_context, kwargs):
            return attention_function(implementation, module)(module, query, key, value, None, **kwargs)
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    attention_mask = tree_context.mask(query.dtype, query.device, window, chunk)
    if selects(kwargs):
        attention_mask = with_selection(module, attention_mask, query, key, kwargs, tree_context)
    elif own_mask is not None and kind in INDEXED:  # so the layer tells what its indexer has selected
        attention_mask = with_own_mask(attention_mask, own_mask)
    if bias is not None:
        attention_mask = attention_mask + bias
    is_of_all_heads = attention_mask.shape[1] == 1
    if implementation == "sdpa" and key.shape[1] < query.shape[1] and is_of_all_heads and not module.training:
        return grouped_attention(query, key, value, attention_mask, kwargs.get("scaling")), None
    function = attention_function(implementation, module)
    return function(module, query, key, value, attention_mask, **kwargs)


@torch.compiler.disable
def _attend_apart(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree_context: AttentionContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    `tree_attention` out of a compiled layer: the kernel's inputs, which have many sizes, are not traced. Where a layer
    runs untraced after all, its rows are parted here, too.
    """
    one_row: Any = tree_context.one_row
    query = one_row.by_rows(query)
    attended, weights = _attend(module, query, key, value, attention_mask, tree_context, **kwargs)
    return one_row.joined(attended), weights


def _is_of_encoder(key: torch.Tensor, context: AttentionContext) -> bool:
    """Whether a layer attends to the encoder, by a mask of the model's own (T5Gemma hands it the context, too)."""
    cache = getattr(context, "encoder_cache", None)
    return cache is not None and any(key is getattr(layer, "keys", None) for layer in cache.layers)


def _is_causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    window: int | None,
    context: AttentionContext,
    options: dict[str, Any],
) -> bool:
    """Whether sdpa without a mask attends as the context says: faster, and as plain `generate` reads a prompt."""
    slots = key.shape[2]
    return (
        getattr(context, "is_new_text", False)
        and query.shape[2] == slots > 1
        and (window is None or window >= slots)
        and getattr(module, "is_causal", True)
        and options.get("is_causal") is not False
        and not selects(options)
    )


class _AsBefore:
    """
    Proxy of an attention layer (or its config) that reports the implementation from before the switch, because flash
    attention reads from the config which of its kernels to run.
    """

    def __init__(self, part: Any, implementation: str):
        self._part, self._implementation = part, implementation

    def __getattr__(self, name: str) -> Any:
        if name == "_attn_implementation":
            return self._implementation
        value = getattr(self._part, name)
        return _AsBefore(value, self._implementation) if name == "config" else value


def tree_attention_mask(*args, config: PreTrainedConfig, **kwargs) -> Any:
    """
    The registered mask function (transformers' `AttentionMaskInterface`): makes the mask of the implementation that
    the model had. Tree forwards bring a mask of their own.
    """
    implementation = previous_implementation(config)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(implementation)
    return None if make_mask is None else make_mask(*args, config=config, **kwargs)


def register() -> None:
    """Registers `tree_attention` and `tree_attention_mask` with transformers as "tree_attention"."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, tree_attention_mask)


def layer_window(module: torch.nn.Module, kwargs: dict[str, Any]) -> int | None:
    """The sliding window of an attention layer, None for full attention."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]
    return window_of(module.config, getattr(module, "layer_idx", None))


def window_of(config: PreTrainedConfig, layer: int | None) -> int | None:
    """The sliding window that a config names for a layer (None: for all), None for full attention."""
    types = getattr(config, "layer_types", None)
    if types is not None and layer is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


register()
