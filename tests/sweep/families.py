"""What the names of fields do not say: values that an architecture needs to be tiny, or to keep its structure."""

from __future__ import annotations

from typing import Any

from transformers import SiglipVisionConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from hf_specdec.compat import INDEXED


_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BY_LAYER_TYPE = {"full_attention": dict(_DEFAULT_ROPE), "sliding_attention": dict(_DEFAULT_ROPE)}
_BLOCKS_OF_KEYS = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
_QSA = {
    "=ple_layer_ids": [1],
    "=eos_token_id": 2,
    "ngram_vocab_size_base": 40,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_DOTS3 = {
    "=num_hidden_layers": 4,
    "=layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "=head_dim": 16,
    "=qk_nope_head_dim": 8,
    "=qk_rope_head_dim": 8,
    "=swa_num_attention_heads": 4,
    "=swa_num_key_value_heads": 4,
    "=swa_q_lora_rank": 16,
    "=swa_kv_lora_rank": 16,
    "=swa_head_dim": 16,
    "=swa_qk_nope_head_dim": 8,
    "=swa_v_head_dim": 8,
}
_INDEXED = min(kind for kind in INDEXED if kind in DYNAMIC_LAYER_TYPE_MAPPING and "attention" in kind)
"""What this release calls layers with an indexer."""
_GLM5_NEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", _INDEXED, _INDEXED, "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],  # a layer takes the choice of the one below
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "index_kpool": 2,
    "linear_num_heads": 4,
}
_INKLING = {"log_scaling_n_floor": 4, "log_scaling_alpha": 0.5, "rel_extent": 12, "sliding_window_size": 6}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "n_groups": 2,
    "chunk_size": 8,
    "time_step_min": 0.3,  # so that prompts, in which it bounds steps, differ from the text
}
_ZAMBA = {"attention_hidden_size": 64, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]}
_ZAMBA |= {"num_hidden_layers": 3}


def _within(place: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{place}.{name}": value for name, value in values.items()}


def _sections(half: int) -> dict[str, Any]:
    """Sections of a rotary embedding in three dimensions, of which the config has no default."""
    return {"text_config.rope_parameters.mrope_section": [half // 4, half // 4, half - 2 * (half // 4)]}


def _siglip(**values: Any) -> SiglipVisionConfig:
    """A vision tower that stands for one of timm's."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    for name, value in values.items():
        setattr(config, name, value)
    return config


EXTRAS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 4}, "max_value_projector_patch_to_query_dict": 4},
    "bamba": {"=attn_layer_indices": [1], "num_hidden_layers": 3} | _MAMBA2,
    "blip-2": {"image_token_index": 70},
    "chameleon": {"vocabulary_map": {"<image>": 70, "IMGIMGAA": 71}},
    "cohere_compass": {"text_config.rope_parameters": _BY_LAYER_TYPE},
    "cohere_compass_text": {"rope_parameters": _BY_LAYER_TYPE},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": {
        "canvas_length": 8,
        "text_config.num_global_key_value_heads": 1,
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
    },
    "doge": {"keep_window_size": 20},
    "dots3_note": {"=text_config": {name[1:]: value for name, value in _DOTS3.items()}},
    "dots3_note_text": _DOTS3,
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 70, "<|extra_200|>": 71}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": _DEFAULT_ROPE | {"mrope_section": [1, 1, 2]}},
    "falcon_h1": {"mamba_d_ssm": 64} | _MAMBA2,
    "falcon_mamba": {"time_step_rank": 5},
    "fast_vlm": {"vision_config": _siglip()},
    "gemma3n": {"vision_config": _siglip(vocab_size=2, vocab_offset=94, rms_norm_eps=1e-6)},
    "gemma4_assistant": {"=text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    **{name: _sections(4) for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "qwen2_vl", "qwen2_5_vl")},
    "glm4v_moe": _sections(2),
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    | _MAMBA2,
    "glm5_next": _within("text_config", _GLM5_NEXT),
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [(0, 0)]},
    "helium": {"head_dim": 8},
    "hrm_text": {"num_hidden_layers": 16},  # 2 layers in each of 2 · 4 cycles
    "hunyuan_vl": {"text_config.rope_parameters.mrope_section": [2, 2, 2, 2]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 5, "num_hidden_layers": 3},
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _INKLING),
    **{name: _within("text_config", _INKLING) for name in ("inkling_mm_model", "inkling2", "inkling2_loop")},
    "instructblip": {"image_token_index": 70},
    "kyutai_speech_to_text": {"codec_config.upsample_groups": 32},
    "mamba": {"time_step_rank": 5},
    "mamba2": {"n_groups": 2, "chunk_size": 8},
    "minimax_m3_vl": _within("text_config", _BLOCKS_OF_KEYS),
    "minimax_m3_vl_text": _BLOCKS_OF_KEYS,
    "mllama": _within("text_config", {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]})
    | {"vision_config.intermediate_layers_indices": [0, 1], "vision_config.vision_output_dim": 96},
    "mistral4": {"head_dim": 32},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": _within("text_config", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "nemo_speechlm": _within("text_config", _NEMOTRON),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_omni": _within("text_config", _NEMOTRON),
    "paddleocr_vl": _sections(8),
    "perception_lm": {"vision_config": _siglip(model_args={"embed_dim": 32})},
    "pix2struct": {"text_config.d_kv": 8},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90} | _sections(4),
    "qwen3_omni_moe": {
        "=enable_audio_output": False,
        "thinker_config.vision_start_token_id": 90,
        "talker_config.text_config.shared_expert_intermediate_size": 48,
        "talker_config.spatial_merge_size": 2,
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "qwen4_exp": {"=text_config": {name[1:]: value for name, value in _QSA.items() if name.startswith("=")}}
    | _within("text_config", {name: value for name, value in _QSA.items() if not name.startswith("=")}),
    "qwen4_exp_text": _QSA,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "step3p7": {"text_config.sliding_window": 8},
    "zamba": {"mamba_dt_rank": 5} | _ZAMBA,
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 8, "time_step_min": 0.3}
    | {"hybrid_layer_ids": [1]}
    | _ZAMBA,
}
"""By `model_type`: values of fields, with dots for configs within; names with "=" are given to the constructor."""
