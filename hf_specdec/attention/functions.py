"""The functions by which layers attend, and what of them the tree-attention kernel is to compute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def implementation_over_trees(implementation: str, kwargs: dict[str, Any]) -> str:
    """The implementation for a tree forward: the model's own if it takes a dense mask, else the nearest that does."""
    if implementation in ("eager", "sdpa"):
        return implementation
    # sdpa supports neither soft-capping nor attention sinks.
    return "eager" if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None else "sdpa"


def attention_function(implementation: str, module: torch.nn.Module) -> Callable:
    """
    The function that a layer calls for an implementation.

    Raises:
        ValueError: if the layer's model file defines no eager attention.
    """
    if implementation == "eager":
        # Every model file defines its own eager attention; a subclass may live in another file.
        for kind in type(module).__mro__:
            function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
            if function is not None:
                return function
        raise ValueError(
            f"`assistant_model`: no eager attention found for {type(module).__name__}. Load the model with "
            "attn_implementation='sdpa'."
        )
    return ALL_ATTENTION_FUNCTIONS[implementation]


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """
    Scaled dot-product attention of query heads that share K/V heads. transformers' "sdpa" repeats keys and values for
    them wherever there is a mask. Here the query heads of one K/V head become further queries of a single head: equal
    results, and K/V are read once.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, queries, head_dim]`): head h reads key head
            h // (heads / kv_heads).
        key, value (`torch.Tensor` of shape `[batch, kv_heads, slots, head_dim]`): not repeated.
        mask (`torch.Tensor` of shape `[1 or batch, 1, queries, slots]`, *optional*): added to the scores.
        scale (`float`, *optional*): factor of the scores; 1 / sqrt(head_dim) if None.

    Returns:
        `torch.Tensor` of shape `[batch, queries, heads, head_dim]`, contiguous: some models take a view of it.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    query = query.reshape(batch, kv_heads, groups * queries, head_dim)
    if mask is not None and queries > 1:
        mask = mask.repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return output.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous()


def kernel_options(implementation: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Arguments of `KernelInputs.attend` in place of a layer's call. Soft-capping and sinks are applied where the
    implementation applies them: sdpa does not, whatever the layer asks for.

    Args:
        implementation (`str`): "eager" or "sdpa".
        options (`Mapping`): the keyword arguments of the call.
    """
    is_eager = implementation == "eager"
    return {
        "scale": options.get("scaling"),
        "softcap": options.get("softcap") if is_eager else None,
        "sinks": options.get("s_aux") if is_eager else None,
    }
