"""How large keys and values are, by a model's config."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig


def head_dim_of(config: PretrainedConfig) -> int:
    """Elements of a key or value of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_bytes_per_layer(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the key and the value of one token in one decoder layer, all heads together."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * heads * head_dim_of(config) * dtype.itemsize
