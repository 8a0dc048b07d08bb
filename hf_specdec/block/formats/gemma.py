"""The decoder layers of DeepSpec's heads for Gemma 4 targets: Gemma 4 layers, with full or sliding attention."""

from __future__ import annotations

from dataclasses import dataclass
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

FULL, SLIDING = "full_attention", "sliding_attention"
_DEFAULT_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


def gemma_layer_config(
    published: dict[str, Any], keys: Keys, vocab_size: int, reasons: dict[str, str]
) -> PreTrainedConfig:
    """
    The config of the decoder layers: sizes as in the weights, the rest as published. Of what Gemma 4 can do, the heads
    have neither experts, inputs per layer nor shared K/V. Layers with a sliding window have heads of another size.

    Args:
        published (`dict`): the published config.
        keys (`Keys`): the weights.
        vocab_size (`int`): size of the target's vocabulary.
        reasons (`dict[str, str]`): gets an entry for everything that is assumed.

    Raises:
        ValueError: if a value is missing, impossible, or at odds with the weights.
    """
    num_layers = keys.num_layers()
    types = (published.get("layer_types") or ["full_attention"] * num_layers)[:num_layers]
    if len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise ValueError(
            f"{keys.name}: `layer_types`={types!r} in config.json must say '{FULL}' or '{SLIDING}' for each of the "
            f"{num_layers} layers of a head for Gemma 4."
        )
    hidden_size = keys.shape("layers.0.self_attn.q_proj.weight")[1]
    sizes = {kind: _Attention.of(keys, types.index(kind)) for kind in set(types)}
    full, sliding = (sizes.get(kind, next(iter(sizes.values()))) for kind in (FULL, SLIDING))
    if full.num_heads != sliding.num_heads:
        raise ValueError(
            f"{keys.name}: layers with full attention have {full.num_heads} heads, and those with a window "
            f"{sliding.num_heads}; in Gemma 4 both have as many."
        )
    window = published.get("sliding_window")
    if SLIDING in sizes and (type(window) is not int or window < 1):
        raise ValueError(
            f"{keys.name}: `sliding_window`={window!r} in config.json must be a positive whole number, for the layers "
            f"that are '{SLIDING}'."
        )
    first = f"layers.{types.index(FULL) if FULL in types else 0}.self_attn"
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
            num_attention_heads=full.num_heads,
            num_key_value_heads=sliding.num_kv_heads,
            num_global_key_value_heads=full.num_kv_heads,
            head_dim=sliding.head_dim,
            global_head_dim=full.head_dim,
            attention_k_eq_v=FULL in sizes and f"{first}.v_proj.weight" not in keys,
            attention_bias=f"{first}.o_proj.bias" in keys,
            layer_types=types,
            rope_parameters={kind: _rope(published, kind, keys.name, reasons) for kind in sorted(sizes)},
            **({"sliding_window": window} if SLIDING in sizes else {}),
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            enable_moe_block=False,
            use_double_wide_mlp=False,
        )
    except (StrictDataclassError, KeyError, TypeError) as error:
        raise ValueError(f"{keys.name}: config.json does not describe decoder layers: {error}") from error


@dataclass(frozen=True)
class _Attention:
    """Sizes of the attention of one kind of layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, keys: Keys, layer: int) -> _Attention:
        """
        The sizes of a layer's attention.

        Raises:
            ValueError: if its tensors do not fit one another.
        """
        name = f"layers.{layer}.self_attn"
        (head_dim,) = keys.shape(f"{name}.q_norm.weight", 1)
        q_size, _ = keys.shape(f"{name}.q_proj.weight")
        kv_size, _ = keys.shape(f"{name}.k_proj.weight")
        if q_size % head_dim or kv_size % head_dim:
            raise ValueError(
                f"{keys.name}: `{name}.q_norm.weight` says that heads have {head_dim} values, but q_proj has {q_size} "
                f"rows and k_proj {kv_size}, which are no multiples."
            )
        return cls(q_size // head_dim, kv_size // head_dim, head_dim)


def _rope(published: dict[str, Any], kind: str, name: str, reasons: dict[str, str]) -> dict[str, Any]:
    """The rotary embedding of a kind of layer."""
    rope = published.get("rope_parameters")
    if rope is None:
        reasons["rope_theta"] = "config.json names none, and this is Gemma 4's default"
        return dict(_DEFAULT_ROPES[kind])
    found = rope.get(kind) if isinstance(rope, dict) else None
    if not isinstance(found, dict) or "rope_theta" not in found or "rope_type" not in found:
        raise ValueError(
            f"{name}: `rope_parameters`={rope!r} in config.json must hold an object `{kind}` with `rope_type` and "
            "`rope_theta`."
        )
    return dict(found)
