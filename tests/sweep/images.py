"""Prompts that hold an image, made without a processor: pixels of the size that the config names."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from .shrinking import parts_of


Inputs = dict[str, torch.Tensor]
_IMAGE_NAMES = ("image_token_id", "image_token_index", "image_patch_id")
_WITHOUT_PLACES = ("blip", "git")
"""Architectures that put image features before the text, where no token stands for them."""


class NoImages(ValueError):
    """The sweep does not know how to make an image for this model."""


def with_images(model: PreTrainedModel, text: Inputs) -> Inputs:
    """
    Adds an image to every row of left-padded text prompts: in front of the last four tokens, or before all of them.

    Raises:
        NoImages: if the config names no image token, or the features cannot be counted.
    """
    rows = len(text["input_ids"])
    vision = _vision_config(model)
    generator = torch.Generator().manual_seed(7)
    grid = getattr(vision, "spatial_merge_size", None) is not None and "image_grid_thw" in _arguments(model)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    if grid:
        patches = 4 * vision.spatial_merge_size
        elements = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        pixels = torch.randn(rows * patches * vision.spatial_merge_size, elements, generator=generator)
        shape = torch.tensor([[1, vision.spatial_merge_size, patches]] * rows)
        images = {"pixel_values": pixels.to(model.dtype), "image_grid_thw": shape}
    else:
        size = vision.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.randn(rows, channels, height, width, generator=generator)
        images = {"pixel_values": pixels.to(model.dtype)}
    model_type = model.config.model_type
    if model_type in _WITHOUT_PLACES:
        return text | images
    if model_type == "idefics":
        mask = torch.ones(*text["input_ids"].shape, 1, dtype=torch.long)
        return text | {"pixel_values": images["pixel_values"][:, None], "image_attention_mask": mask}
    if model_type == "kosmos-2":
        places = torch.zeros_like(text["input_ids"])
        places[:, -4 - model.config.latent_query_num : -4] = 1
        return text | images | {"image_embeds_position_mask": places}
    if model_type == "mllama":
        tiles = vision.max_num_tiles
        pixels = images["pixel_values"][:, None, None].expand(-1, 1, tiles, -1, -1, -1)
        mask = torch.ones(*text["input_ids"].shape, 1, tiles, dtype=torch.long)
        ratios = {
            "aspect_ratio_ids": torch.ones(rows, 1).long(),
            "aspect_ratio_mask": torch.ones(rows, 1, tiles).long(),
        }
        return text | ratios | {"pixel_values": pixels, "cross_attention_mask": mask}
    token = next((value for name in _IMAGE_NAMES if (value := getattr(model.config, name, None)) is not None), None)
    if token is None:
        raise NoImages("the config names no image token")
    if "qformer_input_ids" in _arguments(model):
        images["qformer_input_ids"] = text["input_ids"]
    images, count = _readable(model, images)
    count //= rows
    ids = text["input_ids"]
    places = torch.full((rows, count), token)
    inputs = {
        "input_ids": torch.cat([ids[:, :-4], places, ids[:, -4:]], dim=1),
        "attention_mask": torch.cat([text["attention_mask"][:, :-4], torch.ones_like(places), torch.ones(rows, 4)], 1),
    }
    inputs["attention_mask"] = inputs["attention_mask"].long()
    arguments = _arguments(model)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in arguments:
            inputs[name] = (inputs["input_ids"] == token).long()
    return inputs | images


def _vision_config(model: PreTrainedModel) -> Any:
    for name in ("vision_config", "vision_encoder", "vit_config"):
        config = getattr(model.config, name, None)
        if config is not None:
            return config
    raise NoImages("the config has no vision config")


def _arguments(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _readable(model: PreTrainedModel, images: Inputs) -> tuple[Inputs, int]:
    """
    The images in the form that the model reads: with a dimension for images or tiles, or with their sizes; and how
    many places their features take.
    """
    if "image_grid_thw" in images:
        return images, _count_features(model, images)
    pixels = images["pixel_values"]
    sizes = torch.tensor([list(pixels.shape[-2:])] * len(pixels))
    tiles = pixels[:, None]
    forms = [images, {"pixel_values": tiles}, {"pixel_values": pixels, "image_sizes": sizes}]
    forms += [
        {"pixel_values": tiles, "image_sizes": sizes},
        {"pixel_values": tiles.expand(-1, 2, -1, -1, -1), "image_sizes": sizes},
    ]
    first: Exception | None = None
    for form in forms:
        try:
            return form, _count_features(model, form)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _count_features(model: PreTrainedModel, images: Inputs) -> int:
    """How many places the features of all images take."""
    owner = model if hasattr(model, "get_image_features") else model.model
    with torch.no_grad():
        features = owner.get_image_features(**images)
    features = getattr(features, "pooler_output", features)
    if isinstance(features, torch.Tensor):
        return features.shape[:-1].numel()
    return sum(part.shape[:-1].numel() for part in features)


def has_images(model: PreTrainedModel) -> bool:
    """Whether a model takes images at all."""
    return "pixel_values" in _arguments(model) and any(
        "vision" in type(part).__name__.lower() for part in parts_of(model.config)
    )
