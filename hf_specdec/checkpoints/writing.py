"""Shared parts of writing a head in a published format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from .reading import Checkpoint
from .target_files import TargetFiles


@dataclass(eq=False)
class Writing:
    """
    A head converted to a published format.

    Args:
        config (`dict`): content of config.json.
        weights (`dict[str, torch.Tensor]`): the tensors, by the names of the format.
        file (`str`): name of the weight file.
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor] = field(repr=False)
    file: str = "model.safetensors"

    def as_checkpoint(self) -> Checkpoint:
        """What reading the written files gives."""
        return Checkpoint("the written head", json.loads(json.dumps(self.config)), dict(self.weights))

    def save(self, folder: str | Path) -> Path:
        """Writes both files to a folder, created if there is none, and returns the path of the weights."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file
        weights = {key: tensor.contiguous() for key, tensor in self.weights.items()}
        if path.suffix == ".safetensors":
            save_file(weights, path, metadata={"format": "pt"})
        else:
            torch.save(weights, path)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        return path


def check_expressible(
    config: PreTrainedConfig, allowed: dict[str, Any], format: str, remedy: str = "Write it as hf_specdec."
) -> None:
    """
    Checks that a format can express a config.

    Args:
        config (`PreTrainedConfig`): the config of the head, or of its layers.
        allowed (`dict`): for each field the value, or a tuple of the values, that the format can express.
        format (`str`): name of the format.
        remedy (`str`, *optional*): last sentence of the error, which says what to do instead.

    Raises:
        ValueError: naming the first field with another value.
    """
    for name, values in allowed.items():
        values = values if isinstance(values, tuple) else (values,)
        value = getattr(config, name, None)
        if value is None and False in values:
            continue  # a kind of layer without the option
        if value not in values:
            raise ValueError(
                f"`{name}`={value!r}: the format {format} cannot say so; it knows "
                f"{' or '.join(repr(value) for value in values)}. {remedy}"
            )


LAYER_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "vocab_size",
)
"""Config fields of a head's decoder layers that change its logits, beside the rotary embedding and windows."""


def layer_fields(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Config fields of a head's decoder layers that all formats write, under the names of transformers' configs."""
    others = ("initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id")
    names = (*LAYER_FIELDS, *others)
    fields = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return fields | {"tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch.")}


def outer_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` beside `rope_scaling`, as configs were written before transformers 5."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = scaling == {"rope_type": "default"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}


def published_layers(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`layer_fields`, with the rotary embedding and the sliding windows as transformers' configs name them."""
    fields = layer_fields(config, dtype) | {"rope_parameters": dict(config.rope_parameters)}
    if getattr(config, "sliding_window", None) is not None:
        fields |= {"sliding_window": config.sliding_window, "layer_types": list(config.layer_types)}
        fields |= {"use_sliding_window": True} if config.model_type == "qwen3" else {}
    return fields


def t2d_of(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Which of the target's tokens a draft vocabulary holds, `[vocab_size]` bool."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    t2d[target_ids.cpu()] = True
    return t2d


def chain_proposals(algorithm: str, num_drafts: int, verifier: str | None, architectures: list[str]) -> dict[str, Any]:
    """The `speculators_config`, from which vLLM takes how to use a head: to draft greedy chains of `num_drafts`."""
    chain = {"proposal_type": "greedy", "speculative_tokens": num_drafts, "verifier_accept_k": 1}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [chain | {"accept_tolerance": 0.0}],
        "verifier": {"name_or_path": verifier, "architectures": architectures},
    }


def verifier_of(config: PreTrainedConfig, target: TargetFiles | None) -> tuple[str | None, list[str]]:
    """Name and architectures of a head's target: the given one, else what the head's config says."""
    if target is None:
        return config.target_name, []
    return target.name, list(target.config.architectures or [])
