"""The layer of LongCat-Flash's MTP module: half a layer of the target's class, one attention and one dense MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class HalfLayer(nn.Module):
    """
    The first attention and the first dense MLP of a decoder layer, without its experts.

    Args:
        layer (`nn.Module`): a `LongcatFlashDecoderLayer`.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn[0], layer.mlps[0]
        self.input_layernorm, self.post_attention_layernorm = (
            layer.input_layernorm[0],
            layer.post_attention_layernorm[0],
        )

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Maps hidden states `[batch, rows, H]` to hidden states; `kwargs` are those of the decoder layer."""
        states = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


def has_half_layer(kind: type[PreTrainedModel], names: set[str]) -> bool:
    """Whether tensors of these names are those of half a layer of this decoder."""
    return kind.__name__ == "LongcatFlashModel" and "self_attn.q_b_proj.weight" in names


def build_half(
    kind: type[PreTrainedModel], config: PreTrainedConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """
    A decoder with half a layer, and what does not fit, as `from_pretrained` tells it.

    Args:
        kind (`type`): the class of the decoder.
        config (`PreTrainedConfig`): its config.
        weights (`dict[str, torch.Tensor]`): its tensors.
        dtype (`torch.dtype`): dtype of the weights.
    """
    config.num_layers = 1
    with torch.device("meta"):
        block: Any = kind(config)
    block.layers = nn.ModuleList([HalfLayer(block.layers[0])])
    block.rotary_emb = type(block.rotary_emb)(config=config)
    own = block.state_dict()
    fitting = {
        name: tensor.to(dtype) for name, tensor in weights.items() if name in own and own[name].shape == tensor.shape
    }
    block.load_state_dict(fitting, strict=False, assign=True)
    mismatched = [
        (name, tensor.shape, own[name].shape)
        for name, tensor in weights.items()
        if name in own and own[name].shape != tensor.shape
    ]
    found = {
        "missing_keys": own.keys() - weights.keys(),
        "unexpected_keys": weights.keys() - own.keys(),
        "mismatched_keys": mismatched,
    }
    return block.eval(), found
