"""The decoder layers of DeepSpec's heads for Gemma 4 targets: Gemma 4 layers, all of them with full attention."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from ...checkpoints.keys import Keys


_COPIED_FIELDS = (
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "hidden_activation",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "rms_norm_eps",
)


def gemma_layer_config(
    published: dict[str, Any], keys: Keys, vocab_size: int, reasons: dict[str, str]
) -> PreTrainedConfig:
    """
    The config of the decoder layers: sizes as in the weights, the rest as published. Of what Gemma 4 can do, the heads
    have neither experts, inputs per layer, shared K/V nor sliding windows.

    Args:
        published (`dict`): the published config.
        keys (`Keys`): the weights.
        vocab_size (`int`): size of the target's vocabulary.
        reasons (`dict[str, str]`): gets an entry for everything that is assumed.

    Raises:
        ValueError: if a value is missing, impossible, or at odds with the weights.
    """
    first = "layers.0.self_attn"
    (head_dim,) = keys.shape(f"{first}.q_norm.weight", 1)
    q_size, hidden_size = keys.shape(f"{first}.q_proj.weight")
    kv_size, _ = keys.shape(f"{first}.k_proj.weight")
    if q_size % head_dim or kv_size % head_dim:
        raise ValueError(
            f"{keys.name}: `{first}.q_norm.weight` says that heads have {head_dim} values, but q_proj has {q_size} "
            f"rows and k_proj {kv_size}, which are no multiples."
        )
    num_layers = keys.num_layers()
    types = (published.get("layer_types") or ["full_attention"])[:num_layers]
    if set(types) != {"full_attention"}:
        raise ValueError(
            f"{keys.name}: `layer_types`={types!r} in config.json: all layers of a head for Gemma 4 must be "
            "'full_attention'."
        )
    fields = {name: published[name] for name in _COPIED_FIELDS if published.get(name) is not None}
    if published.get("attention_k_eq_v") is False and f"{first}.v_proj.weight" not in keys:
        keys.shape(f"{first}.v_proj.weight")  # which says that it is missing
    try:
        return AutoConfig.for_model(
            "gemma4_text",
            **fields,
            hidden_size=hidden_size,
            intermediate_size=keys.shape("layers.0.mlp.gate_proj.weight")[0],
            num_hidden_layers=num_layers,
            vocab_size=vocab_size,
            num_attention_heads=q_size // head_dim,
            num_key_value_heads=kv_size // head_dim,
            num_global_key_value_heads=kv_size // head_dim,
            head_dim=head_dim,
            global_head_dim=head_dim,
            attention_k_eq_v=f"{first}.v_proj.weight" not in keys,
            attention_bias=f"{first}.o_proj.bias" in keys,
            layer_types=["full_attention"] * num_layers,
            rope_parameters={"full_attention": _rope(published, keys.name, reasons)},
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            enable_moe_block=False,
            use_double_wide_mlp=False,
        )
    except (StrictDataclassError, KeyError, TypeError) as error:
        raise ValueError(f"{keys.name}: config.json does not describe decoder layers: {error}") from error


def _rope(published: dict[str, Any], name: str, reasons: dict[str, str]) -> dict[str, Any]:
    """The rotary embedding of full attention."""
    rope = published.get("rope_parameters")
    if rope is None:
        reasons["rope_theta"] = "config.json names none, and this is Gemma 4's default"
        return {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
    full = rope.get("full_attention") if isinstance(rope, dict) else None
    if not isinstance(full, dict) or "rope_theta" not in full or "rope_type" not in full:
        raise ValueError(
            f"{name}: `rope_parameters`={rope!r} in config.json must hold an object `full_attention` with `rope_type` "
            "and `rope_theta`."
        )
    return dict(full)
