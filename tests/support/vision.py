"""Tiny random vision-language models, with prompts that hold an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

from hf_specdec import NgramDraft

from .heads import tiny_head
from .models import VOCAB, noisy_copy, prompts, tiny_config


IMAGE, IMAGE_START, IMAGE_END, VIDEO = VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4
Inputs = dict[str, torch.Tensor]

DRAFTS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "ngram": lambda model: NgramDraft(),
    "model": noisy_copy,
    "head": tiny_head,
}


def _vision(**values: int) -> dict[str, int]:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return small | {"image_size": 8} | values


def _sharpened(model: PreTrainedModel, sharpness: float) -> PreTrainedModel:
    """In float64, with weights large enough for text and image to matter; see `tiny_model`."""
    model = model.to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mm_input_projection_weight"):
                parameter.normal_()  # starts as zeros
            elif parameter.dim() > 1:
                parameter.mul_(sharpness * (sharpness if "q_proj" in name or "k_proj" in name else 1.0))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def text_with_image(batch_size: int, num_image_tokens: int, padding: bool) -> Inputs:
    """Prompts that hold an image between its two markers, behind what may be padding."""
    inputs = prompts(batch_size, 20, padding=padding)
    ids = inputs["input_ids"].clamp(max=VIDEO - 1)
    ids[:, 8], ids[:, 9 + num_image_tokens] = IMAGE_START, IMAGE_END
    ids[:, 9 : 9 + num_image_tokens] = IMAGE
    return inputs | {"input_ids": ids}


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def llava() -> PreTrainedModel:
    torch.manual_seed(2)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_vision(patch_size=4, projection_dim=16)),
        text_config=tiny_config("llama"),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    return _sharpened(LlavaForConditionalGeneration(config), 3.0)


def llava_inputs(batch_size: int, padding: bool) -> Inputs:
    return text_with_image(batch_size, 4, padding) | {"pixel_values": pixels(batch_size, 3, 8, 8)}


def gemma3() -> PreTrainedModel:
    """Image tokens attend to each other in both directions; sliding windows."""
    torch.manual_seed(0)
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**_vision(patch_size=2)),
        text_config=tiny_config("gemma3_text"),
        image_token_id=IMAGE,
        boi_token_index=IMAGE_START,
        eoi_token_index=IMAGE_END,
        mm_tokens_per_image=4,
    )
    return _sharpened(Gemma3ForConditionalGeneration(config), 2.0)


def gemma3_inputs(batch_size: int, padding: bool) -> Inputs:
    inputs = text_with_image(batch_size, 4, padding)
    return inputs | {
        "token_type_ids": (inputs["input_ids"] == IMAGE).long(),
        "pixel_values": pixels(batch_size, 3, 8, 8),
    }


def qwen2_vl() -> PreTrainedModel:
    """Positions of three dimensions, which fall behind the number of tokens."""
    torch.manual_seed(0)
    text = tiny_config("llama").to_dict() | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    }
    text = {name: value for name, value in text.items() if name not in ("architectures", "model_type")}
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 32}
    config = Qwen2VLConfig(
        vision_config=vision | {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1},
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )
    return _sharpened(Qwen2VLForConditionalGeneration(config), 3.0)


def qwen3_vl() -> PreTrainedModel:
    """Interleaved positions; the first layers get features of images, too."""
    torch.manual_seed(0)
    text = tiny_config("qwen3").to_dict() | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        }
    }
    text = {name: value for name, value in text.items() if name not in ("architectures", "model_type")}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 64}
    config = Qwen3VLConfig(
        vision_config=vision | {"deepstack_visual_indexes": [0, 1]},
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )
    return _sharpened(Qwen3VLForConditionalGeneration(config), 3.0)


def qwen2_vl_inputs(batch_size: int, padding: bool) -> Inputs:
    inputs = text_with_image(batch_size, 6, padding)
    return inputs | {
        "mm_token_type_ids": (inputs["input_ids"] == IMAGE).long(),
        "pixel_values": pixels(24 * batch_size, 12),
        "image_grid_thw": torch.tensor([[1, 4, 6]] * batch_size),
    }


VISION_MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[int, bool], Inputs]]] = {
    "llava": (llava, llava_inputs),
    "gemma3": (gemma3, gemma3_inputs),
    "qwen2_vl": (qwen2_vl, qwen2_vl_inputs),
    "qwen3_vl": (qwen3_vl, qwen2_vl_inputs),
}
"""For every family: the model, and its inputs for a batch size, left-padded or not."""

_PIECES: tuple[tuple[int, ...], ...] = ((5, 2), (1, 9), (3, 4, 6), (21, 1))
"""Tokens before, between and after the images of a prompt."""


def ragged_image_prompts(name: str, pieces: tuple[tuple[int, ...], ...] = _PIECES) -> list[Inputs]:
    """
    Prompts of a family as a processor returns them for one each. `pieces` are the tokens of every prompt before,
    between and after its images: one piece more than images.
    """
    generator, made = torch.Generator().manual_seed(3), []
    is_grid = name not in ("llava", "gemma3")
    for of_prompt in pieces:
        images = len(of_prompt) - 1
        image = [IMAGE_START, *[IMAGE] * (6 if is_grid else 4), IMAGE_END]
        tokens: list[int] = []
        for number, count in enumerate(of_prompt):
            tokens += image if number else []
            tokens += torch.randint(3, VIDEO, (count,), generator=generator).tolist()
        inputs: Inputs = {"input_ids": torch.tensor([tokens])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if images:
            is_image = inputs["input_ids"] == IMAGE
            shape = (24 * images, 12) if is_grid else (images, 3, 8, 8)
            inputs["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
            if is_grid:
                inputs["image_grid_thw"] = torch.tensor([[1, 4, 6]] * images)
            if name != "llava":
                inputs["mm_token_type_ids" if is_grid else "token_type_ids"] = is_image.long()
        made.append(inputs)
    return made


def padded(prompts: list[Inputs]) -> Inputs:
    """Prompts as one batch, padded on the left; images come in the order of the rows."""
    most = max(inputs["input_ids"].shape[1] for inputs in prompts)
    made: Inputs = {}
    for name in dict.fromkeys(name for inputs in prompts for name in inputs):
        if name in ("pixel_values", "image_grid_thw"):
            made[name] = torch.cat([inputs[name] for inputs in prompts if name in inputs])
            continue
        rows = [inputs.get(name, torch.zeros_like(inputs["input_ids"])) for inputs in prompts]
        made[name] = torch.cat([torch.nn.functional.pad(row, (most - row.shape[1], 0)) for row in rows])
    return made
