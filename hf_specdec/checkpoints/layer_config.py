"""The config of a head's decoder layers, from what was published and what the weights say."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .keys import Keys


DEFAULT_ROPE_THETA = 10000.0  # for heads whose config names none: the target's is not inherited
_COPIED_FIELDS = (
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "rms_norm_eps",
)
# "su": Phi-3's first name for longrope. "mrope": text positions are equal in all sections of a multimodal embedding.
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}


def layer_config(
    published: dict[str, Any], keys: Keys, vocab_size: int, conventions: dict[str, str], kind: str | None = None
) -> PreTrainedConfig:
    """
    The config of the head's decoder layers: sizes, biases and norms as in the weights, the rest as published.

    Args:
        published (`dict`): the published config, or the part of it that describes the layers.
        keys (`Keys`): the weights.
        vocab_size (`int`): size of the target's vocabulary.
        conventions (`dict[str, str]`): gets an entry for everything that is assumed.
        kind (`str`, *optional*): the layers' model type, if the format knows it; else told from the weights.

    Raises:
        ValueError: if a value is missing, impossible, or at odds with the weights.
    """
    first = "layers.0.self_attn"
    kind = kind or _kind_of_layers(keys, first)
    fields = {name: published[name] for name in _COPIED_FIELDS if published.get(name) is not None}
    if fields.get("hidden_act", "silu") not in ACT2FN:
        raise ValueError(f"{keys.name}: `hidden_act`={fields['hidden_act']!r} in config.json is unknown.")
    fields |= _attention_sizes(published, keys)
    fields |= {
        "hidden_size": keys.shape(f"{first}.o_proj.weight")[0],
        "intermediate_size": keys.shape("layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": keys.num_layers(),
        "vocab_size": vocab_size,
        "attention_bias": f"{first}.o_proj.bias" in keys,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in keys,
        "rope_parameters": _rotary_embedding(published, keys.name, conventions),
    }
    fields |= _window(published, fields["num_hidden_layers"], kind, keys.name, conventions)
    try:
        return AutoConfig.for_model(kind, **fields)
    except (StrictDataclassError, KeyError, TypeError) as error:
        raise ValueError(f"{keys.name}: config.json does not describe decoder layers: {error}") from error


def _kind_of_layers(keys: Keys, first: str) -> str:
    if f"{first}.q_norm.weight" in keys:
        return "qwen3"
    return "qwen2" if f"{first}.q_proj.bias" in keys and f"{first}.o_proj.bias" not in keys else "llama"


def _attention_sizes(published: dict[str, Any], keys: Keys) -> dict[str, int]:
    """Numbers of heads and `head_dim`. The weights give the products; q's norm or the config must give a factor."""
    q_size, _ = keys.shape("layers.0.self_attn.q_proj.weight")
    kv_size, _ = keys.shape("layers.0.self_attn.k_proj.weight")
    num_heads = _positive(published, "num_attention_heads", keys.name)
    head_dim = _positive(published, "head_dim", keys.name)
    if "layers.0.self_attn.q_norm.weight" in keys:
        (head_dim,) = keys.shape("layers.0.self_attn.q_norm.weight", 1)
    elif head_dim is None:
        if num_heads is None:
            raise ValueError(
                f"{keys.name}: config.json has neither `num_attention_heads` nor `head_dim`, and the weights only "
                f"tell their product, {q_size}. Add one of them."
            )
        head_dim = q_size // num_heads
    if q_size != head_dim * (num_heads or q_size // head_dim) or kv_size % head_dim:
        raise ValueError(
            f"{keys.name}: `num_attention_heads`={num_heads} and `head_dim`={published.get('head_dim')} in "
            f"config.json do not fit the weights: q_proj has {q_size} rows, k_proj {kv_size}."
        )
    return {
        "head_dim": head_dim,
        "num_attention_heads": q_size // head_dim,
        "num_key_value_heads": kv_size // head_dim,
    }


def _positive(published: dict[str, Any], field: str, name: str) -> int | None:
    value = published.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}: `{field}`={value!r} in config.json must be a positive whole number.")
    return value


def _rotary_embedding(published: dict[str, Any], name: str, conventions: dict[str, str]) -> dict[str, Any]:
    """
    `rope_parameters` as transformers takes them. Published configs have `rope_theta` inside or outside of the object,
    name its type "rope_type" or "type", and call the object `rope_parameters` or `rope_scaling`; where there are both,
    `rope_scaling` wins, as in transformers.
    """
    rope: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        values = published.get(field) or {}
        if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
            raise ValueError(f"{name}: `{field}`={values!r} in config.json must be one flat object.")
        rope |= {key: value for key, value in values.items() if value is not None}
    kind = rope.pop("type", None)
    kind = rope.get("rope_type", kind or "default")
    rope["rope_type"] = _ROPE_ALIASES.get(kind, kind)
    if rope["rope_type"] != "default" and rope["rope_type"] not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"{name}: `rope_type`={kind!r} in config.json is unknown; known are 'default', "
            f"{', '.join(map(repr, ROPE_INIT_FUNCTIONS))}."
        )
    for source in (published, rope):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(
                f"{name}: `partial_rotary_factor`={source['partial_rotary_factor']} in config.json: a head with "
                "partial rotary embeddings, which this version does not read."
            )
    theta = rope.get("rope_theta", published.get("rope_theta"))
    if theta is None:
        conventions["rope_theta"] = f"{DEFAULT_ROPE_THETA:.0f}: the head's config gives none; the target's is its own"
        theta = DEFAULT_ROPE_THETA
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"{name}: `rope_theta`={theta!r} in config.json must be a positive number.")
    return rope | {"rope_theta": float(theta)}


def _window(
    published: dict[str, Any], num_layers: int, kind: str, name: str, conventions: dict[str, str]
) -> dict[str, Any]:
    """
    `layer_types` and `sliding_window`. A window counts only where `layer_types` or `use_sliding_window` asks for it,
    because configs copied from a target name a window that no code for training or serving heads applies.
    """
    types, window = published.get("layer_types"), published.get("sliding_window")
    if types is None:
        slides = window is not None and bool(published.get("use_sliding_window"))
        types = ["sliding_attention" if slides else "full_attention"] * num_layers
        if window is not None and not slides:
            conventions["sliding_window"] = (
                f"{window} is ignored: neither layer types nor `use_sliding_window` ask for it"
            )
    known = isinstance(types, list) and set(types) <= {"sliding_attention", "full_attention"}
    if not known or len(types) < num_layers:
        raise ValueError(
            f"{name}: `layer_types`={types!r} in config.json must name, for each of {num_layers} layers, "
            "'full_attention' or 'sliding_attention'."
        )
    types = types[:num_layers]
    if "sliding_attention" not in types:
        return {"layer_types": types, "sliding_window": None}
    if _positive(published, "sliding_window", name) is None:
        raise ValueError(f"{name}: `layer_types` in config.json ask for a `sliding_window`, which is missing.")
    conventions["sliding_window"] = f"{window}: the head's config asks for it"
    return {"layer_types": types, "sliding_window": window} | ({} if kind == "llama" else {"use_sliding_window": True})
