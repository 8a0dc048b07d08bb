"""
Tiny random models of real architectures, in float64 so that equality with plain `generate` is no matter of rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


VOCAB = 61

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 12}
_UNTIED = {"tie_word_embeddings": False}  # with tied ones a random model repeats its last token
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 500.0,
        **_WINDOW,
        **_UNTIED,
    },
    "gemma3_text": {"num_hidden_layers": 7, "query_pre_attn_scalar": 8, **_WINDOW, **_UNTIED},
    "mistral": _WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # Its layers do not tell the attention function their window: the config's kinds of layers do.
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
        **_WINDOW,
    },
    # Attention sinks.
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        **_WINDOW,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **_UNTIED},
    "phi": {},
    # These do not use the attention interface: a 4D mask goes to their own attention.
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 4, **_UNTIED},
    "stablelm": {},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, **_UNTIED},
}
"""The model families that tests go through: config values that differ from the small default."""

KV_SHARING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    **_WINDOW,
    **_UNTIED,
}
"""Config values of a "gemma4_text" whose last two layers reuse the K/V of the first two."""

UNEQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    # As published: full layers have larger and fewer heads, whose values are their keys.
    "gemma4": (
        "gemma4_text",
        KV_SHARING
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    ),
    # Keys and values of other sizes; more heads and sinks in layers with a window.
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "head_dim": 12,
            "v_head_dim": 8,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "partial_rotary_factor": 0.34,
            **_WINDOW,
            **_UNTIED,
        },
    ),
}
"""Families whose layers differ in the sizes of keys and values: model type and config values."""

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
"""Multi-head latent attention."""
_EXPERTS_OF_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", MLA | _EXPERTS_OF_DEEPSEEK),
    "glm4_moe_lite": ("glm4_moe_lite", MLA | _EXPERTS_OF_DEEPSEEK | {"mlp_layer_types": ["dense", "sparse"]}),
    "minicpm3": ("minicpm3", MLA),
    # Two attentions a layer, and experts that count their tokens.
    "longcat_flash": (
        "longcat_flash",
        MLA
        | {
            "num_hidden_layers": 4,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 16,
        },
    ),
}
"""Families that cache a latent of keys and values: model type and config values."""

# Many heads, because scores that are zero in all of them are equal, and any of these may be selected.
_SELECTED = (
    MLA
    | _EXPERTS_OF_DEEPSEEK
    | {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]}
)
PARTIAL: dict[str, tuple[str, dict[str, Any]]] = {
    # Chunks shorter than the prompt; queries of layers without rotary embedding grow with the slot.
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 2.0,
        },
    ),
    "deepseek_v32": ("deepseek_v32", _SELECTED),
    # Blocks of 4 keys, of which each of two indexer heads selects two, besides the query's own.
    "minimax_m3": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "index_local_blocks": 1,
        },
    ),
}
"""Families that attend to chunks, or to keys that they select: model type and config values."""

PARTS: dict[str, str] = {
    "llama4": "attention_chunk_size",
    "deepseek_v32": "index_topk",
    "minimax_m3": "index_topk_blocks",
}
"""The config value that tells how large the part is."""

# GPT-J and GPT-OSS have no sdpa; Gemma 2's, which drops the soft-capping, is the default of old versions and refused
# by new ones.
_ATTENTION = {"gptj": ("default",), "gpt_oss": ("eager",), "gemma2": ("eager", "default")}


def attention_of(family: str) -> tuple[str, ...]:
    """The attention implementations that tests of a family go through."""
    return _ATTENTION.get(family, ("eager", "sdpa"))


_QUERIES_AND_KEYS = ("q_proj", "k_proj", "query_key_value", "c_attn")
_NOT_SETTABLE = {
    "gpt2": ("hidden_size", "intermediate_size", "head_dim"),
    "gptj": ("hidden_size", "intermediate_size", "head_dim"),
    "falcon": ("head_dim",),
}


def tiny_config(family: str = "llama", **overrides: Any) -> PreTrainedConfig:
    """The config of a tiny model of a family."""
    values = _SMALL | FAMILIES.get(family, {}) | overrides
    for name in _NOT_SETTABLE.get(family, ()):
        values.pop(name, None)
    return AutoConfig.for_model(family, **values)


def tiny_model(
    family: str = "llama",
    seed: int = 0,
    sharpness: float = 3.0,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    attention_sharpness: float = 1.0,
    **overrides: Any,
) -> PreTrainedModel:
    """
    A random model of a family, in float64 unless `dtype` says otherwise. Eager attention computes its softmax in
    float32, and makes padded rows NaN in float64: it gets float32, as do models that are eager by default. `sharpness`
    scales the weight matrices: at 1 a random model hardly reacts to its input; `attention_sharpness` those
    of queries and keys once more: at 1 it hardly reacts to positions. The model has no end token unless
    `generation_config` is given one.
    """
    if dtype is None:
        is_eager = attn_implementation == "eager" or family in ("gemma2", "gpt_oss")
        dtype = torch.float32 if is_eager else torch.float64
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                is_attention = any(part in name for part in _QUERIES_AND_KEYS)
                parameter.mul_(sharpness * (attention_sharpness if is_attention else 1.0))
            elif name.endswith("sinks"):
                parameter.mul_(100.0)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def take_weights(model: PreTrainedModel, other: PreTrainedModel, in_place: bool) -> None:
    """Gives a model the weights of another: writes them where its own are, or puts tensors of their own there."""
    weights = other.state_dict()
    if in_place:
        model.load_state_dict(weights)
    else:
        model.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
        model.tie_weights()


def noisy_copy(model: PreTrainedModel, noise: float = 0.1, seed: int = 1) -> PreTrainedModel:
    """A draft that agrees with `model` often, but not always: its weights with relative noise."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = noise * parameter.std() if parameter.numel() > 1 else 0.0
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(drawn.to(parameter.device) * scale)
    return draft


def padded_otherwise(model: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """A copy with another number of rows in its vocabulary. Those that it has more are as likely as its first."""
    other = copy.deepcopy(model)
    size = model.config.vocab_size
    other.resize_token_embeddings(vocab_size, mean_resizing=False)
    if vocab_size > size:
        with torch.no_grad():
            for module in (other.get_input_embeddings(), other.get_output_embeddings()):
                module.weight[size:] = module.weight[: vocab_size - size]
    return other


def with_fewer_positions(model: PreTrainedModel, number: int) -> PreTrainedModel:
    """A copy of a GPT-2 whose table has only its first positions: a draft that agrees as far as it knows them."""
    draft = tiny_model("gpt2", dtype=model.dtype, max_position_embeddings=number)
    draft.load_state_dict(model.state_dict() | {"transformer.wpe.weight": model.transformer.wpe.weight[:number]})
    return draft


def prompts(batch_size: int, length: int, seed: int = 0, padding: bool = False) -> dict[str, torch.Tensor]:
    """
    Random prompts `[batch, length]` with their mask; with `padding`, row b starts with b · length // (2 · batch) pads.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        for row in range(batch_size):
            pads = row * length // (2 * batch_size)
            ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
