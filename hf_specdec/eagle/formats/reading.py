"""What every format is turned into: an `EagleConfig`, weights under our names, and what was assumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ..configuration_eagle import EagleConfig
from .checkpoint import Checkpoint


DEFAULT_ROPE_THETA = 10000.0  # a head's own: the target's is not inherited
_LAYER_FIELDS = (
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)


@dataclass(eq=False)
class Reading:
    """
    A checkpoint, read.

    Args:
        config (`EagleConfig`): the head.
        weights (`dict[str, torch.Tensor]`): by the names of `EagleHead`.
        ignored (`list[str]`): published keys that are not needed.
    """

    config: EagleConfig
    weights: dict[str, torch.Tensor] = field(repr=False)
    ignored: list[str] = field(default_factory=list)


class Keys:
    """
    The tensors of a checkpoint, taken out one after the other.

    Args:
        checkpoint (`Checkpoint`): what was published.
        renamed (`dict[str, str]`, *optional*): prefixes of published names, and what stands for them here.
    """

    def __init__(self, checkpoint: Checkpoint, renamed: dict[str, str] | None = None):
        self.name = checkpoint.name
        self.weights: dict[str, torch.Tensor] = {}
        for key, tensor in checkpoint.weights.items():
            for prefix, ours in (renamed or {}).items():
                if key.startswith(prefix):
                    key = ours + key.removeprefix(prefix)
                    break
            self.weights[key] = tensor
        self.ignored = [key for key in self.weights if key.endswith("rotary_emb.inv_freq")]
        for key in self.ignored:
            del self.weights[key]

    def __contains__(self, key: str) -> bool:
        return key in self.weights

    def shape(self, key: str) -> tuple[int, ...]:
        """
        The shape of a tensor that must be there.

        Raises:
            ValueError: if it is not.
        """
        if key not in self.weights:
            raise ValueError(
                f"{self.name}: the checkpoint has no `{key}`, which an EAGLE head needs. It has: "
                f"{', '.join(sorted(self.weights)[:8])}, …"
            )
        return tuple(self.weights[key].shape)

    def drop(self, key: str) -> torch.Tensor | None:
        """Takes out a tensor that is not needed."""
        if key in self.weights:
            self.ignored.append(key)
        return self.weights.pop(key, None)

    def num_layers(self) -> int:
        """Decoder layers that there are."""
        return 1 + max(
            (
                int(key.split(".")[1])
                for key in self.weights
                if key.startswith("layers.") and key.split(".")[1].isdigit()
            ),
            default=0,
        )


def layer_config(
    published: dict[str, Any], keys: Keys, vocab_size: int, conventions: dict[str, str]
) -> PreTrainedConfig:
    """
    The config of the head's decoder layers: what the published config says of them, except where the weights say
    otherwise.

    Args:
        published (`dict`): the published config, or the part of it that describes the layers.
        keys (`Keys`): the weights.
        vocab_size (`int`): the target's.
        conventions (`dict[str, str]`): gets what is assumed.
    """
    fields = {name: published[name] for name in _LAYER_FIELDS if published.get(name) is not None}
    first = "layers.0.self_attn"
    q_size, _ = keys.shape(f"{first}.q_proj.weight")
    kv_size, _ = keys.shape(f"{first}.k_proj.weight")
    hidden_size, _ = keys.shape(f"{first}.o_proj.weight")
    head_dim = fields.get("head_dim") or hidden_size // fields.get("num_attention_heads", 32)
    fields |= {
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "num_attention_heads": q_size // head_dim,
        "num_key_value_heads": kv_size // head_dim,
        "intermediate_size": keys.shape("layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": keys.num_layers(),
        "vocab_size": vocab_size,
    }
    kind = "llama"
    if f"{first}.q_norm.weight" in keys:
        kind = "qwen3"
    elif f"{first}.q_proj.bias" in keys and f"{first}.o_proj.bias" not in keys:
        kind = "qwen2"
    fields["attention_bias"] = f"{first}.o_proj.bias" in keys
    fields["mlp_bias"] = "layers.0.mlp.gate_proj.bias" in keys
    _set_window(fields, kind, conventions)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if "rope_theta" not in rope:
        if "rope_theta" not in fields:
            conventions["rope_theta"] = (
                f"{DEFAULT_ROPE_THETA:.0f}: the head's config gives none; the target's is its own"
            )
        rope = {"rope_theta": fields.get("rope_theta", DEFAULT_ROPE_THETA), **rope}
    rope = {"rope_type": rope.get("type", "default"), **rope}
    fields.pop("rope_scaling", None), fields.pop("rope_theta", None)
    fields["rope_parameters"] = rope
    return AutoConfig.for_model(kind, **fields)


def _set_window(fields: dict[str, Any], kind: str, conventions: dict[str, str]) -> None:
    """Makes `layer_types` and `sliding_window` agree, whichever of them was published."""
    types, num_layers = fields.get("layer_types"), fields["num_hidden_layers"]
    # Qwen configs name a window even where none is used.
    window = fields.get("sliding_window")
    if types is None:
        slides = window is not None and fields.get("use_sliding_window", kind == "llama")
        fields["layer_types"] = ["sliding_attention" if slides else "full_attention"] * num_layers
    else:
        slides = "sliding_attention" in types[:num_layers]
        fields["layer_types"] = list(types[:num_layers])
    if slides:
        conventions["sliding_window"] = f"{window}: the head's config asks for it"
        if kind != "llama":
            fields["use_sliding_window"] = True
    else:
        fields["sliding_window"] = None


def read_draft_vocabulary(keys: Keys, vocab_size: int) -> int | None:
    """
    The size of the draft vocabulary, None if it is the target's. Checks `d2t` (offsets: target id = i + d2t[i]), and
    takes out `t2d`, which says the same.

    Raises:
        ValueError: if a draft token's target token is outside the vocabulary or not what `t2d` says.
    """
    num_tokens, _ = keys.shape("lm_head.weight")
    t2d = keys.drop("t2d")
    if "d2t" not in keys:
        if num_tokens != vocab_size:
            raise ValueError(
                f"{keys.name}: `lm_head.weight` has {num_tokens} rows and the vocabulary {vocab_size} tokens, but "
                "there is no `d2t` to map them."
            )
        return None
    d2t = keys.weights["d2t"] = keys.weights["d2t"].long()
    if tuple(d2t.shape) != (num_tokens,):
        raise ValueError(
            f"{keys.name}: `d2t` has shape {tuple(d2t.shape)}, but `lm_head.weight` has {num_tokens} rows."
        )
    target_ids = torch.arange(num_tokens) + d2t
    if num_tokens and (target_ids.min() < 0 or target_ids.max() >= vocab_size):
        wrong = int(((target_ids < 0) | (target_ids >= vocab_size)).nonzero()[0])
        raise ValueError(
            f"{keys.name}: `d2t` maps draft token {wrong} to {int(target_ids[wrong])}, outside the vocabulary of "
            f"{vocab_size} tokens. It must hold offsets: target id = i + d2t[i]."
        )
    if len(target_ids.unique()) != num_tokens:
        raise ValueError(f"{keys.name}: `d2t` maps several draft tokens to one target token.")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], target_ids.sort().values):
        raise ValueError(f"{keys.name}: `t2d` and `d2t` name different target tokens.")
    return num_tokens
