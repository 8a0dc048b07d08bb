"""
The formats that EAGLE heads are published in, one module each.

`read_head` tells the format and turns the checkpoint into an `EagleConfig` and weights under the names of `EagleHead`.
What a head is, is told by its weights wherever the configs of published heads are silent, ambiguous or wrong.
"""

from __future__ import annotations

import re

import torch

from . import angelslim, modelopt, native, safeailab, specforge, speculators
from .checkpoint import Checkpoint, HubOptions
from .reading import Reading


__all__ = ["Checkpoint", "HubOptions", "Reading", "check_weights", "read_head"]

# SafeAILab's has no marks of its own and comes last.
_FORMATS = (native, speculators, modelopt, specforge, angelslim)


def read_head(checkpoint: Checkpoint) -> Reading:
    """
    Reads a checkpoint of any format.

    Raises:
        ValueError: if it is not an EAGLE head, or damaged; the message names the key.
    """
    inner = checkpoint.config.get("model")
    if checkpoint.config.get("model_type") == "eagle" and isinstance(inner, dict):  # as vLLM wraps configs
        checkpoint = Checkpoint(checkpoint.name, inner, checkpoint.weights, checkpoint.is_pickle)
    checkpoint = _without_prefix(checkpoint)
    _refuse_other_models(checkpoint)
    for format in _FORMATS:
        if format.matches(checkpoint):
            return format.read(checkpoint)
    return safeailab.read(checkpoint)


def _without_prefix(checkpoint: Checkpoint) -> Checkpoint:
    """Heads converted for vLLM have `model.` before all names but those of `fc` and the lm_head."""
    weights = checkpoint.weights
    if not any(key in weights for key in ("fc.weight", "model.fc.weight")):
        return checkpoint
    if not any(key.startswith("model.") for key in weights):
        return checkpoint
    weights = {key.removeprefix("model."): tensor for key, tensor in weights.items()}
    if len(weights) != len(checkpoint.weights):
        raise ValueError(f"{checkpoint.name}: the checkpoint holds the same tensors with and without `model.`.")
    return Checkpoint(checkpoint.name, checkpoint.config, weights, checkpoint.is_pickle)


def _refuse_other_models(checkpoint: Checkpoint) -> None:
    """Two kinds of models that are often passed in place of a head."""
    if any(key.startswith("model.layers.0.") for key in checkpoint.weights):
        raise ValueError(
            f"{checkpoint.name}: the checkpoint is a whole language model (it has `model.layers.0.…` and no "
            "`fc.weight`), not an EAGLE head. Load it with `AutoModelForCausalLM` and pass that as the draft."
        )
    if any(re.fullmatch(r"(medusa_head\.)?\d+\.0\.linear\.weight", key) for key in checkpoint.weights):
        raise ValueError(
            f"{checkpoint.name}: the checkpoint holds Medusa heads, not an EAGLE head. Use "
            "`hf_specdec.MedusaHeads.from_pretrained`."
        )


def check_weights(name: str, expected: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """
    Compares what a checkpoint holds with what its head needs.

    Args:
        name (`str`): the checkpoint's.
        expected (`dict[str, torch.Tensor]`): the head's parameters and buffers (shapes and kinds of dtype count).
        weights (`dict[str, torch.Tensor]`): the checkpoint's, under the head's names.

    Raises:
        ValueError: naming the keys that are missing, unknown, of another shape or dtype, or not finite.
    """
    problems = [f"`{key}` is missing ({_shape(expected[key])})" for key in expected if key not in weights]
    problems += [f"`{key}` is unknown ({_shape(weights[key])})" for key in weights if key not in expected]
    for key in expected.keys() & weights.keys():
        tensor, wanted = weights[key], expected[key]
        if tensor.shape != wanted.shape:
            problems.append(f"`{key}` must be {_shape(wanted)}, but is {_shape(tensor)}")
        elif tensor.is_floating_point() != wanted.is_floating_point():
            problems.append(f"`{key}` must be of a dtype like {wanted.dtype}, but is {tensor.dtype}")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"`{key}` holds values that are not finite")
    if problems:
        raise ValueError(f"{name} does not hold the weights of an EAGLE head: {'; '.join(sorted(problems))}.")


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
