"""The decoder layers of heads: those of transformers' models, and what heads of all kinds do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import rotate_half
from transformers.utils import ModelOutput

from .compat import cache_of
from .fusing.forward import is_fused_here


@dataclass(frozen=True)
class Layers:
    """The building blocks of a kind of decoder layer."""

    decoder: Callable[..., Any]
    norm: Callable[..., Any]
    rotary: Callable[..., Any]
    has_qkv_bias: bool | None = None
    """Whether q, k and v have biases although o has none; None: as `attention_bias` says for all four."""


_ROTATE_BY_TYPE = ("gemma4_text",)
"""Model types in which a layer's rotary embedding depends on its type."""


@lru_cache
def _layers(model_type: str) -> Layers:
    """The building blocks of one kind; its model file is imported only where it is needed."""
    if model_type == "gemma4_text":
        gemma4 = import_module("transformers.models.gemma4.modeling_gemma4")
        return Layers(gemma4.Gemma4TextDecoderLayer, gemma4.Gemma4RMSNorm, gemma4.Gemma4TextRotaryEmbedding)
    name = model_type.capitalize()
    file = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    decoder, norm, rotary = (getattr(file, f"{name}{part}") for part in ("DecoderLayer", "RMSNorm", "RotaryEmbedding"))
    return Layers(decoder, norm, rotary, has_qkv_bias=True if model_type == "qwen2" else None)


def layers_of(config: PreTrainedConfig, known: tuple[str, ...] = ("llama", "qwen2", "qwen3")) -> Layers:
    """
    The building blocks for a head's `text_config`.

    Args:
        config (`PreTrainedConfig`): the config.
        known (`tuple[str]`, *optional*): the model types of which there are such heads.

    Raises:
        ValueError: for another model type.
    """
    if config.model_type not in known:
        raise ValueError(
            f"`text_config.model_type`={config.model_type!r}: the layers of a head must be of one of "
            f"{', '.join(map(repr, known))}."
        )
    return _layers(config.model_type)


def write_keys_and_values(
    attention: Any,
    states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **kwargs: Any,
) -> None:
    """
    Writes a layer's keys and values to the cache, without attention: all that a head has to compute for rows from
    which nothing is drafted, such as a prompt's under one layer.

    Args:
        attention (`nn.Module`), states (`torch.Tensor`), position_embeddings (`tuple`): see `keys_and_values`.
        kwargs: the head's cache (`Cache`), by the release's name, and what attention would read.
    """
    keys, values = keys_and_values([attention], states, [position_embeddings])[0]
    cache_of(kwargs).update(keys, values, attention.layer_idx)


def keys_and_values(
    attentions: Sequence[Any],
    states: torch.Tensor,
    position_embeddings: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Keys and values of layers that read the same states, as those of the context of a block, `[batch, kv_heads, rows,
    head_dim]` each. The projections of all layers come first: a compiler multiplies the states with several at once.

    Args:
        attentions (`Sequence[nn.Module]`): the attentions of a kind of layer of `layers_of`. k may have a norm, as in
            Qwen3; in Gemma 4, v has one too, and may be k before its norm.
        states (`torch.Tensor` of shape `[batch, rows, inputs]`): inputs of the projections.
        position_embeddings: of every layer, cosines and sines, `[batch, rows, head_dim]` each.
    """
    found = []
    for attention in attentions:
        keys = attention.k_proj(states)
        found.append((keys, keys if attention.v_proj is None else attention.v_proj(states)))
    return [_finished(*layer) for layer in zip(attentions, found, position_embeddings, strict=True)]


def _finished(
    attention: Any,
    projected: tuple[torch.Tensor, torch.Tensor],
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed keys and values, and turned keys, of projections `[batch, rows, kv_heads · head_dim]`."""
    keys, values = (part.unflatten(-1, (-1, attention.head_dim)) for part in projected)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    if hasattr(attention, "v_norm"):
        values = attention.v_norm(values)
    return turned(keys.transpose(1, 2), *position_embeddings), values.transpose(1, 2)


def turned(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    Keys `[batch, kv_heads, rows, head_dim]` with their positions, of which these are the cosines and sines, `[batch,
    rows, head_dim]` each; by the kernel in forwards whose layers are fused.
    """
    if is_fused_here(keys) and cos.shape[:2] in ((1, keys.shape[2]), (keys.shape[0], keys.shape[2])):
        from hf_specdec_kernels.rotary import unchecked

        return unchecked(keys, keys[:, :0], cos, sin, "halves", False)[0]
    return keys * cos[:, None] + rotate_half(keys) * sin[:, None]


def window_argument(config: PreTrainedConfig, index: int) -> dict[str, int]:
    """
    The sliding window of a Llama layer, as an argument for flash attention, which takes no mask. Other kinds of layers
    pass their window themselves.
    """
    types = getattr(config, "layer_types", None)
    if config.model_type != "llama" or types is None or types[index] != "sliding_attention":
        return {}
    return {"sliding_window": config.sliding_window}


def lm_head_of(head: Any, given: torch.nn.Module | None) -> torch.nn.Module:
    """The lm_head that makes a head's logits: its own, or else the target's, which must be given (ValueError)."""
    lm_head = given if head.lm_head is None else head.lm_head
    if lm_head is None:
        raise ValueError("`lm_head`: this head has none of its own. Pass the target's.")
    return lm_head


def fuse_features(features: torch.Tensor, head: Any) -> torch.Tensor:
    """
    Projects the target's features `[batch, rows, feature_size]` to an EAGLE-3 head's input `[batch, rows, H]`: one
    norm (`input_norm`) or one for each of them (`fc_norm`) where the head has such, then its `fc`.
    """
    if head.input_norm is not None:
        features = head.input_norm(features)
    if head.fc_norm is not None:
        parts = features.chunk(len(head.fc_norm), dim=-1)
        features = torch.cat([norm(part) for norm, part in zip(head.fc_norm, parts, strict=True)], dim=-1)
    return features if head.fc is None else head.fc(features)


def rotations_of(
    rotary: Any, config: PreTrainedConfig, states: torch.Tensor, position_ids: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines of every layer, `[batch, rows, head_dim]` each; layers of one type share them."""
    if config.model_type not in _ROTATE_BY_TYPE:
        return [rotary(states, position_ids)] * config.num_hidden_layers
    by_type = {kind: rotary(states, position_ids, kind) for kind in set(config.layer_types)}
    return [by_type[kind] for kind in config.layer_types[: config.num_hidden_layers]]


class WithDraftVocabulary:
    """A head whose logits may be over fewer tokens than the target's, by the buffer `d2t` of offsets."""

    if TYPE_CHECKING:
        d2t: torch.Tensor | None
        register_buffer: Callable[..., None]

    def _register_offsets(self, draft_vocab_size: int | None) -> None:
        """Makes the buffer `d2t`, None without a draft vocabulary."""
        offsets = None
        if draft_vocab_size is not None:  # where the head's parameters are made
            offsets = torch.zeros(draft_vocab_size, dtype=torch.long, device=torch.get_default_device())
        self.register_buffer("d2t", offsets)

    @property
    def target_ids(self) -> torch.Tensor | None:
        """
        The target's token for every index of the logits, `[draft vocab]` int64, from the offsets `d2t`; None if every
        index is the token itself.
        """
        if self.d2t is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


@dataclass
class HeadOutput(ModelOutput):
    """
    Output of a head's forward.

    Args:
        hidden_states (`torch.Tensor` of shape `[batch, rows, H]`, *optional*): states of the rows, as the head feeds
            them back for the next token or its lm_head reads them; None after a forward that only writes to the cache.
        logits (`torch.Tensor` of shape `[batch, rows, draft vocab]`, *optional*):
            Logits that the rows predict; None if not asked for, or if the lm_head is the target's and was not given.
            Index i stands for the target's token `head.target_ids[i]`.
    """

    hidden_states: torch.Tensor | None = None
    logits: torch.Tensor | None = None
