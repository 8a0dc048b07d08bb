"""How much memory a model takes to read a prompt with images or sound, estimated from its configs and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .positions import num_positions
from .structure import forward_parameters, num_logits_of


_WIDTHS = ("hidden_size", "embed_dim", "d_model", "dim", "width", "encoder_embed_dim")
_INNER = ("intermediate_size", "encoder_ffn_dim", "ffn_dim", "mlp_dim")
_HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads", "attention_heads")
_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")
_OF_SOUND = re.compile("audio|sound|speech|input_features|input_values")
STATES, INNER_STATES = 8, 3
"""States of a layer's width, and of its MLP's inner width, that a token has at most at once."""
SCORES = 3
"""Matrices of scores that attention without a kernel has at once: its softmax is in float32."""
FRAMES = 2
"""Frames of a spectrum that become one position of an encoder of sound."""
FEWEST_BYTES = 1 << 20
"""Bytes that count for any such prompt: kernels have buffers of their own."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """
    An encoder of images or sound.

    Args:
        width, inner (`int`): elements of a state, and of an MLP's inner state.
        heads, depth (`int`): attention heads, and layers.
        per_patch (`int`): elements of the model's input that make one patch, or one frame of sound.
        pixels (`int`): pixels of an image that one patch shows; 0 for sound.
        merged (`int`): patches that become one token of the text.
        fixed (`int`, *optional*): most patches, if images are scaled to one size or sound has one length.
        is_of_sound (`bool`): whether it reads sound.
        keeps_all (`bool`): whether the outputs of all layers are kept until its end.
        has_scores (`bool`): whether its attention makes matrices of scores.
    """

    width: int
    inner: int
    heads: int
    depth: int
    per_patch: int
    pixels: int
    merged: int
    fixed: int | None
    is_of_sound: bool
    keeps_all: bool
    has_scores: bool

    def elements(self, patches: int, together: int) -> int:
        """Elements that the tower has at once for so many patches, of which `together` attend to each other."""
        of_layer = patches * (STATES * self.width + INNER_STATES * self.inner)
        kept = patches * self.width * self.depth if self.keeps_all else 0
        scores = SCORES * self.heads * together * together if self.has_scores else 0
        return of_layer + kept + scores


def towers_of(model: PreTrainedModel) -> list[Tower]:
    """The encoders that a model has beside its text model, by its config."""
    return [tower for tower in _towers(model.config) if tower is not None]


def has_towers(model: PreTrainedModel) -> bool:
    """Whether a model has encoders of images or sound beside its text model, as far as its config tells."""
    return bool(towers_of(model))


def bytes_of_prompt(model: PreTrainedModel, num_tokens: int, values: dict[str, Any], per_token: int) -> int:
    """
    Bytes that a device needs while the model reads a prompt with inputs beside its tokens, in a forward of its own:
    its inputs, the greatest layer of the encoders or of the text model, and a cache of the prompt's K/V.

    Args:
        model (`PreTrainedModel`): the target.
        num_tokens (`int`): tokens of the prompt, those that images stand for included.
        values (`dict[str, Any]`): the inputs beside the tokens.
        per_token (`int`): bytes of the K/V of a token.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    given = sum(value.nbytes for value in tensors.values())
    towers, most, size = towers_of(model), 0, model.dtype.itemsize
    for name, value in tensors.items():
        of_sound = bool(_OF_SOUND.search(name))
        for tower in towers if value.is_floating_point() else ():
            if tower.is_of_sound == of_sound:
                patches = -(-value.numel() // tower.per_patch)
                most = max(most, tower.elements(patches, _together(tower, name, value, tensors)))
    return FEWEST_BYTES + given + _with_text(model, num_tokens, most * size, per_token)


def bytes_of_largest(model: PreTrainedModel, image_pixels: int, per_token: int) -> int:
    """
    Bytes as by `bytes_of_prompt` for a prompt that is little more than one image of `image_pixels` pixels, or than the
    longest sound that an encoder knows; 0 for a model without encoders, or without pixels.
    """
    found, known = [0], num_positions(model)
    for tower in towers_of(model) if image_pixels else ():
        patches = -(-image_pixels // tower.pixels) if tower.fixed is None else tower.fixed
        tokens = -(-patches // tower.merged)
        tokens = tokens if known is None else min(tokens, known)
        own = tower.elements(patches, patches) * model.dtype.itemsize
        given = patches * tower.per_patch * torch.float32.itemsize
        found.append(FEWEST_BYTES + given + _with_text(model, tokens, own, per_token))
    return max(found)


def _with_text(model: PreTrainedModel, num_tokens: int, of_towers: int, per_token: int) -> int:
    """Bytes of K/V, of features of images, and of the encoders or the text model, whichever takes more."""
    config, size = model.config.get_text_config(decoder=True), model.dtype.itemsize
    width, inner = _first(config, _WIDTHS), _inner_of_text(config)
    features = num_tokens * width * size
    layer = num_tokens * (STATES * width + INNER_STATES * inner) * size
    scores = num_tokens**2 * size  # the mask
    if config._attn_implementation == "eager":
        scores += SCORES * _first(config, _HEADS) * num_tokens**2 * size
    logits = (1 if "logits_to_keep" in forward_parameters(model) else num_tokens) * num_logits_of(model) * size
    return max(of_towers, layer + scores, logits) + features + num_tokens * per_token


def _towers(config: PreTrainedConfig) -> Iterator[Tower | None]:
    text = config.get_text_config(decoder=True)
    for name in config.sub_configs:
        own = getattr(config, name, None)
        if not isinstance(own, PreTrainedConfig) or own is text:
            continue
        if any(isinstance(getattr(own, inner, None), PreTrainedConfig) for inner in own.sub_configs):
            yield from _towers(own)  # a thinker's, say
        else:
            yield _tower(config, own, name)


def _tower(config: PreTrainedConfig, own: PreTrainedConfig, name: str) -> Tower | None:
    """The tower of a config; None for one of something else, such as a text model that is not run."""
    width, patch, bins = _first(own, _WIDTHS, most=True), _int(own, "patch_size"), _int(own, "num_mel_bins")
    is_of_sound = bool(bins) or bool(_OF_SOUND.search(name))
    if not width or not (patch or is_of_sound):
        return None
    channels, frames = _int(own, "num_channels", "in_channels") or 3, _int(own, "temporal_patch_size") or 1
    ratio = getattr(own, "mlp_ratio", None)
    inner = _first(own, _INNER) or int(width * (ratio if isinstance(ratio, int | float) else 4))
    merge = _int(own, "spatial_merge_size") or _int(config, "spatial_merge_size") or 1
    return Tower(
        width=width,
        inner=inner,
        heads=_first(own, _HEADS) or 1,
        depth=_first(own, _DEPTHS) or 1,
        per_patch=FRAMES * (bins or 1) if is_of_sound else channels * patch * patch * frames,
        pixels=0 if is_of_sound else patch * patch,
        merged=merge * merge,
        fixed=_fixed_patches(config, own, patch, is_of_sound),
        is_of_sound=is_of_sound,
        keeps_all=hasattr(config, "vision_feature_layer") or hasattr(config, "vision_feature_select_strategy"),
        has_scores=own._attn_implementation == "eager",
    )


def _fixed_patches(config: PreTrainedConfig, own: PreTrainedConfig, patch: int, is_of_sound: bool) -> int | None:
    """Most patches of an encoder that knows one size of images, of which one may become several; None for any size."""
    if is_of_sound:
        return _int(own, "max_source_positions", "max_position_embeddings") or 1500
    size = _int(own, "image_size")
    if not size or not patch or hasattr(own, "spatial_merge_size"):
        return None
    pinpoints = getattr(config, "image_grid_pinpoints", None) or []
    parts = [-(-int(one[0]) // size) * -(-int(one[1]) // size) for one in pinpoints]
    return (size // patch) ** 2 * (1 + max([_int(own, "max_num_tiles") or 0, *parts]))


def _together(tower: Tower, name: str, value: torch.Tensor, tensors: dict[str, torch.Tensor]) -> int:
    """Patches of the largest of several images: what attends to each other."""
    grids = [other for key, other in tensors.items() if key.endswith("grid_thw") and other.numel()]
    patches = -(-value.numel() // tower.per_patch)
    if value.dim() == 2 and grids and not tower.is_of_sound:
        return min(patches, max(int(grid.prod(dim=-1).max()) for grid in grids))
    return patches if value.dim() < 4 else -(-prod(value.shape[-3:]) // tower.per_patch)


def _inner_of_text(config: PreTrainedConfig) -> int:
    """Elements of the inner state of a text model's MLP, or of the experts of one token."""
    of_experts = _int(config, "moe_intermediate_size") * _int(config, "num_experts_per_tok")
    return max(_first(config, _INNER), of_experts) or 4 * _first(config, _WIDTHS)


def _first(config: PreTrainedConfig, names: tuple[str, ...], most: bool = False) -> int:
    """The first, or the greatest, of a config's integers of these names; 0 if there is none."""
    found = [value for name in names if (value := _int(config, name))]
    return 0 if not found else max(found) if most else found[0]


def _int(config: PreTrainedConfig, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        value = max(value, default=0) if isinstance(value, list | tuple) and all(map(_is_int, value)) else value
        if _is_int(value) and value:
            return int(value)
    return 0


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
