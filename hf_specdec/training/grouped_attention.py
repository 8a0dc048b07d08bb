"""Attention for a target that writes, one query per row: no copies of keys, no cuDNN plan for every length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..attention.grouped import grouped_attention


NAME = "hf_specdec_grouped"
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_of_one(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Grouped attention for one query per row, registered with transformers' `AttentionInterface`.

    Shapes: query `[batch, heads, queries, head_dim]`, key and value `[batch, kv heads, slots, head_dim]`, mask
    `[batch, 1, queries, slots]`, output `[batch, queries, heads, head_dim]`. Several queries per row use "sdpa".
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return grouped_attention(query, key, value, attention_mask, scaling), None


AttentionInterface.register(NAME, attention_of_one)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_attention_lent(target: PreTrainedModel) -> Iterator[None]:
    """Switches a target with "sdpa" attention to `attention_of_one` inside the context; leaves other targets alone."""
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
    """Excludes cuDNN attention, which plans anew for every number of keys: 2 ms per layer if it grows each step."""
    return sdpa_kernel(_BACKENDS)
