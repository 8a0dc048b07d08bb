"""Vision-language models whose text model has states: prompts with an image write what they write without a tree."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.batches import limits
from support.hybrids import HYBRIDS, SMALL, Oracle
from support.vision import IMAGE, IMAGE_END, IMAGE_START, VIDEO, pixels, text_with_image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel


_VISION = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 2}
_CONFIGS: dict[str, dict[str, Any]] = {
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
    config = AutoConfig.for_model(family, **_CONFIGS[family], image_token_id=IMAGE, tie_word_embeddings=False)
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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", _CONFIGS)
def test_prompts_with_an_image(family: str, rows: int) -> None:
    model, inputs = model_of(family), inputs_of(family, rows)
    options = {"max_new_tokens": 20, "do_sample": False}
    text = model.generate(**inputs, **options).tolist()
    other_image = inputs | {"pixel_values": -3 * inputs["pixel_values"].flip(-1)}
    assert model.generate(**other_image, **options).tolist() != text
    for drafter in (Oracle(text, 1), model):
        found = model.generate(**inputs, **options, assistant_model=drafter, tree=Oracle.default_tree)
        assert found.tolist() == text


@pytest.mark.parametrize("family", _CONFIGS)
def test_requests_with_images(family: str) -> None:
    """In flight beside texts, with so few blocks that states are read anew."""
    model, three = model_of(family), inputs_of(family, 3)
    images = []
    for row in range(3):
        shown = three["attention_mask"][row].bool()
        own = {"input_ids", "attention_mask", "mm_token_type_ids"}
        of_row = {name: value[row : row + 1, shown] if name in own else value for name, value in three.items()}
        for name in three.keys() - own:
            share = len(three[name]) // 3
            of_row[name] = three[name][row * share : (row + 1) * share]
        images.append(of_row)
    texts = [inputs["input_ids"][:, :7].clamp(max=VIDEO - 1) for inputs in images]
    prompts = [item for text, image in zip(texts, images, strict=True) for item in (text[0].tolist(), image)]
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = []
    for prompt in prompts:
        inputs = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
        expected.append(model.generate(**inputs, **options)[0].tolist())
    drafter = Oracle(expected, 1)
    config = limits(16)
    outputs = model.generate_batch(
        prompts, assistant_model=drafter, tree=Oracle.default_tree, continuous_batching_config=config, **options
    )
    found = [output.prompt_ids + output.generated_tokens for output in outputs.values()]
    assert found == expected
