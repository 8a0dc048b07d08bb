"""The first decoder layer of a head: that of a Llama or Qwen, and what EAGLE changes in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..head_layers import layers_of, write_keys_and_values
from .configuration_eagle import EagleConfig


def _widen_attention(attention: nn.Module, config: PreTrainedConfig, width: int) -> None:
    """Makes the q, k and v of a decoder layer's attention read inputs of another width."""
    bias = layers_of(config).has_qkv_bias
    bias = config.attention_bias if bias is None else bias
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(width, getattr(attention, name).out_features, bias=bias))


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
