"""Tiny vision-language models whose text model has states, with prompts that hold an image."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from .hybrids import HYBRIDS, SMALL
from .vision import IMAGE, IMAGE_END, IMAGE_START, VIDEO, pixels, text_with_image


_VISION = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {
            **SMALL,
            **HYBRIDS["qwen3_5_text"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 1.0,
            },
        },
        "vision_config": {
            **_VISION,
            "depth": 2,
            "num_heads": 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "out_hidden_size": SMALL["hidden_size"],
            "num_position_embeddings": 64,
        },
        "video_token_id": VIDEO,
        "vision_start_token_id": IMAGE_START,
        "vision_end_token_id": IMAGE_END,
    },
    "lfm2_vl": {
        "text_config": {**SMALL, **HYBRIDS["lfm2"], "model_type": "lfm2"},
        "vision_config": {
            **_VISION,
            "model_type": "siglip2_vision_model",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_patches": 16,
        },
        "projector_hidden_size": 24,
    },
}


@cache
def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CONFIGS[family], image_token_id=IMAGE, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.5 if "conv" in name else 1.5 * parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn_like(parameter) * scale)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def inputs_of(family: str, rows: int) -> dict[str, torch.Tensor]:
    """Prompts that hold an image, left-padded where there are several."""
    if family == "lfm2_vl":
        return text_with_image(rows, 4, rows > 1) | {
            "pixel_values": pixels(rows, 16, 12).float(),
            "spatial_shapes": torch.tensor([[4, 4]] * rows),
            "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
        }
    text = text_with_image(rows, 6, rows > 1)
    return text | {
        "mm_token_type_ids": (text["input_ids"] == IMAGE).int(),
        "pixel_values": pixels(24 * rows, 12).float(),
        "image_grid_thw": torch.tensor([[1, 4, 6]] * rows),
    }
