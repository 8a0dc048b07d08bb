"""An embedding of the mask in a file of its own, `mask_embedding.pt`, beside the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.published import section
from ...checkpoints.reading import Checkpoint, HubOptions, load_pickle


FILE, KEY = "mask_embedding.pt", "mask_embedding"


def with_mask_embedding(checkpoint: Checkpoint, options: HubOptions) -> Checkpoint:
    """
    The checkpoint with the embedding of `mask_embedding.pt` among its weights, if there is such a file: a tensor, or a
    dict with the tensor and the mask token.

    Raises:
        ValueError: if the file is damaged, holds no such tensor, or names another mask token than config.json.
    """
    path = options.find(checkpoint.name, FILE, required=False)
    if path is None or KEY in checkpoint.weights:
        return checkpoint
    content = load_pickle(path)
    embedding = _tensor_of(content)
    if embedding is None or not embedding.is_floating_point() or embedding.dim() not in (1, 2):
        raise ValueError(
            f"{path}: must hold the embedding of the mask, a tensor of one dimension, alone or in a dict, but holds "
            f"{_described(content)}."
        )
    _check_token(content, checkpoint, path)
    return replace(checkpoint, weights=checkpoint.weights | {KEY: embedding})


def _tensor_of(content: Any) -> torch.Tensor | None:
    found = [content] if not isinstance(content, dict) else list(content.values())
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def _described(content: Any) -> str:
    if isinstance(content, torch.Tensor):
        return f"a {content.dtype} tensor of shape {list(content.shape)}"
    return f"a dict with {sorted(map(str, content))}" if isinstance(content, dict) else type(content).__name__


def _check_token(content: Any, checkpoint: Checkpoint, path: Path) -> None:
    """Refuses a file that was made for another mask token than the config's."""
    token = content.get("mask_token_id") if isinstance(content, dict) else None
    config = checkpoint.config
    said = section(config, "dflash_config", checkpoint.name).get("mask_token_id", config.get("mask_token_id"))
    if token is not None and said is not None and token != said:
        raise ValueError(
            f"{path}: `mask_token_id`={token!r}, but config.json says {said!r}: the file is of another head. Download "
            "both again."
        )
