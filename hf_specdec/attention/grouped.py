"""
Grouped-query attention with a mask, without repeated keys and values.

transformers' "sdpa" repeats keys and values for the query heads that share them wherever there is a mask. Here the
query heads of one K/V head become further queries of a single head: equal results, and K/V are read once.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """
    Scaled dot-product attention of query heads that share K/V heads.

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
