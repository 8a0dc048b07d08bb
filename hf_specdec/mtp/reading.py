"""Reading the tensors of MTP modules from the files of their target, from which transformers leaves them out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.reading import (
    WEIGHT_FILES,
    HubOptions,
    find_first,
    read_config,
    read_weights,
    tensor_names,
)
from .layouts import LAYOUTS, Layout, ModuleNames, find_modules


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (".weight_scale_inv", ".weight_scale")
"""Names of the scales of weights in 8-bit floats, by which these are multiplied."""
_NO_WEIGHTS = (".input_scale", ".k_scale", ".v_scale")
"""Scales of what is computed, not of weights."""


@dataclass(frozen=True)
class ModuleWeights:
    """
    The tensors of one module.

    Args:
        own (`dict[str, torch.Tensor]`): `fc.…`, `enorm.…`, `hnorm.…`, and `norm.…` if there is one.
        layer (`dict[str, torch.Tensor]`): those of the decoder layer, by their names in the target's class.
    """

    own: dict[str, torch.Tensor]
    layer: dict[str, torch.Tensor]


def read_modules(name: str, num_layers: int, options: HubOptions) -> tuple[Layout, list[ModuleWeights]]:
    """
    Reads the tensors of all modules, and no others.

    Args:
        name (`str`): folder or Hub repository of the target.
        num_layers (`int`): the target's decoder layers.
        options (`HubOptions`): where to look for its files.

    Raises:
        OSError: if there is no such folder or repository, or it holds no weights.
        ValueError: if the checkpoint holds no modules, or they are damaged, incomplete, or quantized in a way that is
            not read.
    """
    options.check(name)
    path = find_first(name, WEIGHT_FILES, options)
    found = find_modules(tensor_names(path), num_layers)
    if found is None:
        looked_for = ", ".join(f"`{layout.example.format(layers=num_layers)}`" for layout in LAYOUTS)
        raise ValueError(
            f"{name}: the checkpoint holds no MTP modules; looked for {looked_for}. (`save_pretrained` does not write "
            "them: name the checkpoint as it was published. Else draft with a head, a model, or 'ngram'.)"
        )
    layout, modules = found
    for index, module in enumerate(modules):
        _check_parts(name, layout, index, module)
    tensors = _read(name, path, {key for module in modules for key in (*module.own, *module.layer)}, options)
    tensors = _dequantized(name, tensors, _block_size(name, options))
    return layout, [
        ModuleWeights(_by_own_names(module.own, tensors), _by_own_names(module.layer, tensors)) for module in modules
    ]


def _check_parts(name: str, layout: Layout, index: int, module: ModuleNames) -> None:
    wanted = ["fc", "enorm", "hnorm", *(["norm"] if layout.norm else [])]
    missing = [part for part in wanted if f"{part}.weight" not in module.own.values()]
    if missing:
        places = (
            " or ".join(f"`{place.format(**module.place)}.weight`" for place in getattr(layout, part))
            for part in missing
        )
        raise ValueError(
            f"{name}: MTP module {index} ({layout.families}) is incomplete: it has no {'; no '.join(places)}. "
            "Download the checkpoint again."
        )


def _read(name: str, path: Path, keys: set[str], options: HubOptions) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in _shards(name, path, keys, options):
        tensors |= read_weights(shard, only=keys)
    missing = sorted(keys - tensors.keys())
    if missing:
        raise ValueError(f"{name}: no file holds `{missing[0]}`, which the index names. Download it again.")
    return tensors


def _shards(name: str, path: Path, keys: set[str], options: HubOptions) -> list[Path]:
    """The weight files that hold the keys; of an index, the others need not even be there."""
    if not path.name.endswith(".index.json"):
        return [path]
    files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    return [options.find(name, file) for file in sorted({files[key] for key in keys})]


def _block_size(name: str, options: HubOptions) -> list[int] | None:
    """Rows and columns of a weight that share a scale, if the config names them."""
    config: Any = read_config(name, options.find(name, "config.json"))
    for held in (config, config.get("text_config") or {}):
        size = (held.get("quantization_config") or {}).get("weight_block_size")
        if size is not None:
            return list(size)
    return None


def _dequantized(name: str, tensors: dict[str, torch.Tensor], block_size: list[int] | None) -> dict[str, torch.Tensor]:
    """
    The tensors with weights in 8-bit floats multiplied by their scales.

    Raises:
        ValueError: for tensors of another quantization.
    """
    found = {}
    for key, tensor in tensors.items():
        if key.endswith((*_SCALES, *_NO_WEIGHTS)):
            continue
        places = (key.removesuffix(".weight") + end for end in _SCALES)
        scale = next((tensors[place] for place in places if place in tensors), None)
        if tensor.dtype in _EIGHT_BITS and scale is not None and tensor.dim() == 2:
            tensor = tensor.float() * _expanded(scale.float(), tensor.shape, block_size)
            tensor = tensor.to(torch.bfloat16)
        elif tensor.dtype not in _FLOATS or scale is not None:
            raise ValueError(
                f"{name}: the MTP modules are quantized in a way that is not read: `{key}` is "
                f"{str(tensor.dtype).removeprefix('torch.')}. Use a checkpoint that keeps them in bfloat16 or "
                "8-bit floats, or another draft."
            )
        found[key] = tensor
    return found


def _expanded(scale: torch.Tensor, shape: torch.Size, block_size: list[int] | None) -> torch.Tensor:
    """A scale for every element of a weight, from one for the whole, for each row, or for each block."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    scale = scale[:, None] if scale.dim() == 1 else scale
    for dim, size in enumerate(shape):
        if scale.shape[dim] in (1, size):
            continue
        block = -(-size // scale.shape[dim]) if block_size is None else block_size[dim]
        scale = scale.repeat_interleave(block, dim=dim).narrow(dim, 0, size)
    return scale


def _by_own_names(names: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {own: tensors[key] for key, own in names.items() if key in tensors}
