"""Shared parts of writing a head in a published format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from ...checkpoints.reading import Checkpoint
from ..configuration_eagle import EagleConfig
from .target_files import TargetFiles


if TYPE_CHECKING:
    from ..modeling_eagle import EagleHead


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


# Fields in which EAGLE-3 heads differ, with the values that every EAGLE-3 format can express.
PLAIN_EAGLE3 = {
    "eagle_version": 3,
    "has_fc": True,
    "fc_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_before_residual": False,
    "norm_hidden_twice": False,
    "norm_embeddings": True,
    "norm_output": False,
    "final_norm": True,
}
PLAIN_LAYERS = {"model_type": ("llama",), "attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,)}


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


def boundaries(config: EagleConfig, target: TargetFiles | None) -> list[int] | None:
    """
    The hidden states that an EAGLE-3 head reads, as boundaries; None: the default ones of an unknown target.

    Raises:
        ValueError: if the number of the target's layers has to be known.
    """
    if config.aux_layer_ids is None:
        return None
    if target is not None:
        return config.aux_boundaries(target.num_layers)
    if config.aux_layer_convention == "auto":
        raise ValueError(
            f"`aux_layer_ids`={config.aux_layer_ids}: whether these are boundaries or layer outputs depends on the "
            "target. Give it (`--target`), or load the head with `aux_layer_convention=`."
        )
    shift = 1 if config.aux_layer_convention == "outputs" else 0
    return sorted(layer + shift for layer in config.aux_layer_ids)


def eagle3_weights(
    head: EagleHead, target: TargetFiles | None, first_layer: str, format: str
) -> dict[str, torch.Tensor]:
    """
    The weights of an EAGLE-3 head, with `t2d` beside `d2t`, and an lm_head in any case.

    Args:
        first_layer (`str`): the prefix of the first decoder layer's names.

    Raises:
        ValueError: if the head uses the target's lm_head, and there is no target.
    """
    weights = {
        first_layer + key.removeprefix("layers.0.") if key.startswith("layers.0.") else key: tensor.detach().cpu()
        for key, tensor in head.state_dict().items()
    }
    if head.lm_head is None:
        if target is None:
            raise ValueError(
                f"The head uses the target's lm_head, which the format {format} stores. Give the target (`--target`)."
            )
        rows = target.lm_head().to(head.dtype)
        weights["lm_head.weight"] = rows if head.target_ids is None else rows[head.target_ids.cpu()]
    if head.target_ids is not None:
        t2d = torch.zeros(head.config.vocab_size, dtype=torch.bool, device="cpu")
        t2d[head.target_ids.cpu()] = True
        weights["t2d"] = t2d
    return weights
