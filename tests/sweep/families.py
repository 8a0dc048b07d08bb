"""What the names of fields do not say: values that an architecture needs to be tiny, or to keep its structure."""

from __future__ import annotations

from typing import Any


_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BY_LAYER_TYPE = {"full_attention": dict(_DEFAULT_ROPE), "sliding_attention": dict(_DEFAULT_ROPE)}
_QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}


def _within(place: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{place}.{name}": value for name, value in values.items()}


EXTRAS: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 70, "IMGIMGAA": 71}},
    "cohere_compass": {"text_config.rope_parameters": _BY_LAYER_TYPE},
    "cohere_compass_text": {"rope_parameters": _BY_LAYER_TYPE},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": {"text_config.num_global_key_value_heads": 1, "text_config.num_experts": 4},
    "doge": {"keep_window_size": 20},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 70, "<|extra_200|>": 71}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": _DEFAULT_ROPE | {"mrope_section": [1, 1, 2]}},
    "gemma4_assistant": {"=text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [(0, 0)]},
    "kyutai_speech_to_text": {"=codec_config": {"codebook_size": 64}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_omni_moe": {"talker_config.text_config.shared_expert_intermediate_size": 48},
    "qwen4_exp": _within("text_config", _QSA),
    "qwen4_exp_text": _QSA,
    "reformer": {"axial_pos_embds": False},
}
"""By `model_type`: values of fields, with dots for configs within; names with "=" are given to the constructor."""
