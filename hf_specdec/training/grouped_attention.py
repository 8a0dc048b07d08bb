"""
Attention of one query per row for grouped heads without copies of keys and values.

transformers' "sdpa" repeats keys and values for the heads that share them wherever there is a mask. Here the heads
that share a key are further queries of one head: the same numbers from a third of the memory traffic for a group of 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


NAME = "hf_specdec_grouped"
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    The registered attention function (transformers' `AttentionInterface`): query `[batch, heads, queries, head_dim]`,
    key and value `[batch, kv heads, slots, head_dim]`, mask `[batch, 1, queries, slots]`, to the output
    `[batch, queries, heads, head_dim]`. Several queries per row go through "sdpa".
    """
    batch, heads, queries, size = query.shape
    if queries > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    query = query.view(batch, key.shape[1], heads // key.shape[1], size)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_attention_lent(target: PreTrainedModel) -> Iterator[None]:
    """Lets a target that attends by "sdpa" attend by this while inside; leaves any other as it is."""
    before = target.config._attn_implementation
    switches = before == "sdpa" and target._supports_attention_backend
    try:
        if switches:
            target.set_attn_implementation(NAME)
        yield
    finally:
        if switches:
            target.set_attn_implementation(before)


def without_cudnn() -> AbstractContextManager[None]:
    """Attention without cuDNN, which plans anew for every number of keys: 2 ms a layer if it grows at every step."""
    return sdpa_kernel(_BACKENDS)
