"""Makes the default config of any architecture tiny, by the names of its fields, and keeps its structure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


VOCAB = 96
FIRST_SPECIAL = 64
"""Tokens from here on are image tokens and the like; those below, from 3 on, are text."""
POSITIONS = 160
WINDOW = 8
LAYERS = 2

_RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?|unpadded_vocab_size|num_embeddings|decoder_vocab_size", VOCAB),
    (r"codebook_size", 64),
    (r"(num_)?(hidden_|decoder_|encoder_)?layers|n_layers?|depth|num_blocks|num_layers_per_stack", LAYERS),
    (r"resampler_depth", LAYERS),
    (r"num_(encoder|decoder)_layers|conf_num_hidden_layers|num_global_layers|aligner_num_add_layers", LAYERS),
    (r"max_position_embeddings|n_positions|n_ctx|max_target_positions|max_seq_len|context_length", POSITIONS),
    (r"max_source_positions", 64),
    (r"sliding_window(_size)?|window_size|attention_window_size|local_attention|attention_chunk_size", WINDOW),
    (r"(.*_)?num_((encoder_|decoder_)?attention_)?heads|n_heads?|attention_heads|num_sliding_.*heads", 4),
    (r"(encoder|decoder)_attention_heads|resampler_heads|resampler_n_heads", 4),
    (r"(.*_)?v_head_dim", 8),
    (r"global_head_dim|qk_head_dim", 32),
    (r"(.*_)?head_dim|d_kv|kv_channels|dim_head|d_head|attention_head_size|swa_v_head_dim|resampler_dim_head", 16),
    (r"(.*_)?(hidden_size|hidden_dim|embed_dim|d_model|n_embd|d_inner)|embedding_(size|dim)|word_embed_proj_dim", 32),
    (r"(image_token_)?embed_dim|projection_dim|projector_(input|output)_dim|lru_width|qk_dim|emb_dim|decoder_dim", 32),
    (r"(input|output)_embedding_size|dim_model_base|output_dim|adapter_out_dim|feature_size_out", 32),
    (r"(.*_)?(intermediate_size|intermediate_size_mlp|ffn_dim|mlp_dim|ffn_hidden_size)|d_ff|dim_ff|dff", 48),
    (r"(share_)?expert_dim|shared_experts?_intermediate_size|feed_forward_size", 48),
    (r"(kv|q|o)_lora_rank|laurel_rank|hc_lowrank|gated_norm_rank|adapter_rank", 16),
    (r"(num_|n_|moe_num_)?(local_|routed_)?experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"(n_group|topk_group|num_expert_group|n_groups)", 1),
    (r"mm_tokens_per_image|num_query_tokens|num_image_tokens|latent_query_num", 4),
    (r"resampler_n_latents|resampler_num_latents", 4),
    (r"rotary_dim|floor_scale", 4),
    (r"index_topk", 6),
    (r"base_channels", 32),
    (r"num_filters", 4),
    (r"(mamba_)?d_state|(ssm_)?state_size", 8),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
)  # fmt: skip
_PATTERNS = [(re.compile(pattern), size) for pattern, size in _RULES]
_KEY_VALUE_HEADS = re.compile(r"(.*_)?num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|.*_kv_heads")
_IF_NONE = {"head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
"""Sizes that a model needs, and of which its config has no default."""
_NUMBERS_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TOKEN = re.compile(r"(?!pad|bos|eos|decoder_start).*(_token_(id|index)|_id|_index)$")
_NO_TOKENS = frozenset({"lang_id", "altup_active_idx", "insert_layer_id", "moe_layer_end_index", "unk_index"})


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and all configs within it, the innermost first."""
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)
    yield config


def shrink(config: PreTrainedConfig) -> None:
    """Makes a config and all configs within it tiny, in place."""
    next_token = FIRST_SPECIAL
    for part in parts_of(config):
        next_token = _shrink_part(part, next_token)


def _shrink_part(config: PreTrainedConfig, next_token: int) -> int:
    values = vars(config)
    before = dict(values)
    chosen = _choose_layers(config)
    for name, value in list(values.items()):
        if value is None and name in _IF_NONE:
            _put(config, name, _IF_NONE[name])
        if isinstance(value, bool) or not isinstance(value, int) or name in chosen:
            continue
        if _TOKEN.fullmatch(name) and name not in _NO_TOKENS and value > 2:
            _put(config, name, next_token)
            next_token += 1
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"):
            _put(config, name, {"pad_token_id": 0, "eos_token_id": 2}.get(name, 1))
        elif _KEY_VALUE_HEADS.fullmatch(name):
            # As many as there are queries' heads, one, or half as many: as before.
            same = value == before.get(name.replace("key_value", "attention"), before.get("num_attention_heads"))
            _put(config, name, 4 if same else min(value, 2))
        else:
            size = next((size for pattern, size in _PATTERNS if pattern.fullmatch(name)), None)
            if name == "window_size" and "patch_size" in values:
                continue  # in pixels
            if size is not None and value > size:
                _put(config, name, size)
    if isinstance(values.get("eos_token_id"), list):
        _put(config, "eos_token_id", 2)
    if isinstance(values.get("image_size"), int) and isinstance(values.get("patch_size"), int):
        _put(config, "image_size", 2 * values["patch_size"])
    _shrink_rotary(config)
    return next_token


def _put(config: PreTrainedConfig, name: str, value: Any) -> None:
    vars(config)[name] = value


def _choose_layers(config: PreTrainedConfig) -> list[str]:
    """
    Keeps layers of every kind: two of one kind, or each kind in the order in which they appear, at least twice where
    there are two. Returns the fields that are set.
    """
    names = [name for name in _NUMBERS_OF_LAYERS if name in vars(config)]
    count = vars(config)[names[0]] if names else None
    if not isinstance(count, int):
        return []
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and not (name == "mlp_only_layers")
        and not (value and all(isinstance(item, int) for item in value) and list(value) == list(range(count)))
    }  # fmt: skip
    if not lists:
        return []
    kinds: dict[Any, int] = {}
    for index in range(count):
        kinds.setdefault(repr([value[index] for value in lists.values()]), index)
    chosen = sorted(kinds.values())[:6]
    if len(chosen) <= 2:
        chosen *= 2
    if vars(config).get("num_kv_shared_layers"):
        _put(config, "num_kv_shared_layers", len(chosen) // 2)
    for name, value in lists.items():
        _put(config, name, type(value)(value[index] for index in chosen))
    for name in names:
        _put(config, name, len(chosen))
    return [*names, *lists, "num_kv_shared_layers"]


def _shrink_rotary(config: PreTrainedConfig) -> None:
    """The lengths at which rotary embeddings change, and the sections of those in several dimensions."""
    ropes = vars(config).get("rope_parameters")
    if not isinstance(ropes, dict):
        return
    head_dim = vars(config).get("head_dim") or 8
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:
        if not isinstance(rope, dict):
            continue
        if rope.get("mrope_section"):
            half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
            sections = len(rope["mrope_section"])
            first = half // sections
            rope["mrope_section"] = [half - first * (sections - 1)] + [first] * (sections - 1)
