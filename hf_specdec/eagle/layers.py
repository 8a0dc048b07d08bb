"""The decoder layers of a head: those of a Llama or Qwen, and what EAGLE changes in the first of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from ..compat import cache_of
from .configuration_eagle import EagleConfig


@dataclass(frozen=True)
class _Layers:
    """The building blocks of a kind of decoder layer."""

    decoder: Callable[..., Any]
    norm: Callable[..., Any]
    rotary: Callable[..., Any]
    has_qkv_bias: bool | None = None
    """Whether q, k and v have biases although o has none; None: as `attention_bias` says for all four."""


_LAYERS = {
    "llama": _Layers(
        modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding
    ),
    "qwen2": _Layers(
        modeling_qwen2.Qwen2DecoderLayer, modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.Qwen2RotaryEmbedding, True
    ),
    "qwen3": _Layers(
        modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding
    ),
}


def layers_of(config: PreTrainedConfig) -> _Layers:
    """
    The building blocks for a head's `text_config`.

    Raises:
        ValueError: for a model type of which no heads are known.
    """
    if config.model_type not in _LAYERS:
        raise ValueError(
            f"`text_config.model_type`={config.model_type!r}: the layers of a head must be of one of "
            f"{', '.join(map(repr, _LAYERS))}."
        )
    return _LAYERS[config.model_type]


def _widen_attention(attention: nn.Module, config: PreTrainedConfig, width: int) -> None:
    """Makes the q, k and v of a decoder layer's attention read inputs of another width."""
    bias = layers_of(config).has_qkv_bias
    bias = config.attention_bias if bias is None else bias
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(width, getattr(attention, name).out_features, bias=bias))


def write_keys_and_values(
    attention: Any,
    states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **kwargs: Any,
) -> None:
    """
    Writes a layer's keys and values to the cache, without attention: all that a head of one layer has to compute for
    rows from which nothing is drafted, such as a prompt's.

    Args:
        attention (`nn.Module`): the attention of a kind of layer in `_LAYERS`; k may have a norm, as in Qwen3.
        states (`torch.Tensor` of shape `[batch, rows, inputs]`): inputs of the projections.
        position_embeddings: cosines and sines, `[batch, rows, head_dim]` each.
        kwargs: the head's cache (`Cache`), by the release's name, and what attention would read.
    """
    heads = (*states.shape[:-1], -1, attention.head_dim)
    keys, values = attention.k_proj(states).view(heads), attention.v_proj(states).view(heads)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    cos, sin = (part[:, None] for part in position_embeddings)
    keys = keys * cos + modeling_llama.rotate_half(keys) * sin
    cache_of(kwargs).update(keys, values, attention.layer_idx)


class Eagle1Layer(nn.Module):
    """The first layer of an EAGLE-1 head: a decoder layer without the norm before its attention."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        layer = layers_of(config.text_config).decoder(config.text_config, 0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(
        self, states: torch.Tensor, embeddings: torch.Tensor, only_cache: bool = False, **kwargs: Any
    ) -> torch.Tensor | None:
        """
        Maps `states` to states, `[batch, rows, H]` both; `embeddings` is ignored, since `fc` has mixed it into the
        states. With `only_cache` the result is None, see `write_keys_and_values`.
        """
        if only_cache:
            write_keys_and_values(self.self_attn, states, **kwargs)
            return None
        states = states + self.self_attn(hidden_states=states, **kwargs)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Layer(nn.Module):
    """The first layer of an EAGLE-3 head: its attention reads embedding and hidden state side by side."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        text_config, kind = config.text_config, layers_of(config.text_config)
        layer = kind.decoder(text_config, 0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        _widen_attention(self.self_attn, text_config, 2 * config.hidden_size)
        has_input_norm = config.norm_embeddings or config.norm_hidden_twice
        self.input_layernorm: Any = layer.input_layernorm if has_input_norm else None
        self.hidden_norm = kind.norm(config.hidden_size, eps=text_config.rms_norm_eps)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.norm_embeddings = config.norm_embeddings
        self.norm_hidden_twice = config.norm_hidden_twice
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, states: torch.Tensor, embeddings: torch.Tensor, only_cache: bool = False, **kwargs: Any
    ) -> torch.Tensor | None:
        """
        Maps `states` and `embeddings` to states, `[batch, rows, H]` each. With `only_cache` the result is None, see
        `write_keys_and_values`.
        """
        normed_embeddings = self.input_layernorm(embeddings) if self.norm_embeddings else embeddings
        normed = self.hidden_norm(self.input_layernorm(states) if self.norm_hidden_twice else states)
        inputs = torch.cat([normed_embeddings, normed], dim=-1)
        if only_cache:
            write_keys_and_values(self.self_attn, inputs, **kwargs)
            return None
        residual = normed if self.norm_before_residual else states
        states = residual + self.self_attn(hidden_states=inputs, **kwargs)[0]
        return states + self.mlp(self.post_attention_layernorm(states))
