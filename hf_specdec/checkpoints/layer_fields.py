"""The config of a head's decoder layers as a field of the head's own config."""

from __future__ import annotations

import copy
import math
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


def as_layers_config(value: Any, model_type: str) -> PreTrainedConfig:
    """
    A config of decoder layers that is the head's own.

    Args:
        value (`PreTrainedConfig` or `dict`, *optional*): the config, which may be the target's, or its fields.
        model_type (`str`): the kind of layers where `value` names none.

    Raises:
        ValueError: if `value` is neither.
    """
    if isinstance(value, PreTrainedConfig):
        config = copy.deepcopy(value)
    elif isinstance(value, dict | None):
        fields = dict(value or {})
        config = AutoConfig.for_model(fields.pop("model_type", model_type), **fields)
    else:
        raise ValueError(f"`text_config` must be a config or a dict, but is {value!r}.")
    # Embeddings and lm_head are never tied: both belong to the target, or the lm_head has the draft vocabulary.
    config.tie_word_embeddings = False
    return config


def change_layers(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    """
    Takes what changes the decoder layers out of `fields`, and changes the head's `config` accordingly: a dict for
    `text_config` changes the fields that it names, `rope_theta` those of its rotary embeddings.

    Raises:
        ValueError: for a `rope_theta` that is not a positive number.
    """
    if isinstance(given := fields.get("text_config"), dict):
        layers = config.text_config.to_dict() | given
        fields["text_config"] = AutoConfig.for_model(layers.pop("model_type"), **layers)
    if "text_config" in fields:
        config.text_config = as_layers_config(fields.pop("text_config"), config.text_config.model_type)
    if "rope_theta" not in fields:
        return
    theta = fields.pop("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ValueError(f"`rope_theta` must be a positive number, but is {theta!r}.")
    rope = config.text_config.rope_parameters
    by_type = {kind: part for kind, part in rope.items() if isinstance(part, dict)}
    if by_type:
        config.text_config.rope_parameters = rope | {
            kind: {**part, "rope_theta": float(theta)} for kind, part in by_type.items()
        }
    else:
        config.text_config.rope_parameters = {**rope, "rope_theta": float(theta)}


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of every layer of a head, None where a layer has none."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types[: config.num_hidden_layers]]
