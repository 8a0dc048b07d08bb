"""Fields of an `EagleConfig` that a published format has no place for: carried along, or refused by name."""

from __future__ import annotations

import json
from typing import Any

from transformers.utils import logging

from ...checkpoints.published import PublishedHead, section
from ...checkpoints.reading import Checkpoint
from ...trees import as_tree
from ..configuration_eagle import EagleConfig
from .target_files import TargetFiles
from .writing import LAYER_FIELDS, boundaries


logger = logging.get_logger(__name__)

# Our object in the config.json of other formats. Nothing in it changes the head's logits, so who ignores it reads the
# same head.
_SECTION = "hf_specdec"
_CARRIED = ("default_tree", "target_name", "recipe")
# Compared in one spelling, and those about the checkpoint that was read.
_COMPARED_ELSEWHERE = ("text_config", "aux_layer_ids", "aux_layer_convention", "has_lm_head")
_ABOUT_READING = ("source_format", "conventions")


def carried_fields(config: EagleConfig, target_name: str | None) -> dict[str, Any]:
    """
    The object `hf_specdec` for a config.json; empty if there is nothing to carry.

    Args:
        config (`EagleConfig`): config of the head.
        target_name (`str`, *optional*): name of the target if it is given; else the config's.
    """
    tree = config.default_tree
    fields = {
        "default_tree": tree.to_dict() if hasattr(tree, "to_dict") else tree,
        "target_name": target_name or config.target_name,
        "recipe": config.recipe,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    return {_SECTION: fields} if fields else {}


def with_carried_fields(reading: PublishedHead, checkpoint: Checkpoint) -> PublishedHead:
    """
    The head with the fields that `carried_fields` wrote into its config.

    Raises:
        ValueError: if a field has an impossible value.
    """
    fields = section(checkpoint.config, _SECTION, checkpoint.name)
    for name in _CARRIED:
        if getattr(reading.config, name) is None:  # the format's own word counts more
            setattr(reading.config, name, fields.get(name))
    tree = fields.get("default_tree")
    if tree is not None:
        try:
            as_tree(tree)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{checkpoint.name}: `default_tree`={tree!r} in `{_SECTION}` of config.json is no tree: {error}"
            ) from error
    return reading


def check_round_trip(config: EagleConfig, again: EagleConfig, format: str, target: TargetFiles | None) -> None:
    """
    Checks that a head that was written in a format is read again as the same head.

    Args:
        config (`EagleConfig`): config of the head.
        again (`EagleConfig`): config that is read from what is to be written.
        format (`str`): name of the format.
        target (`TargetFiles`, *optional*): the target's files, if they were given.

    Raises:
        ValueError: naming the first field that would be lost.
    """
    before, after = _compared(config, target), _compared(again, target)
    for name, value in before.items():
        if value != after[name] and not (name == "target_name" and target is not None):
            raise ValueError(
                f"`{name}`={value!r}: the format {format} cannot say so, and the head would be read with "
                f"{after[name]!r}. Write it as hf_specdec."
            )
    if config.has_lm_head != again.has_lm_head:
        if config.has_lm_head:
            raise ValueError(
                f"`has_lm_head`=True: the format {format} cannot say so, and the head would use the target's. Write "
                "it as hf_specdec."
            )
        logger.warning(
            f"`has_lm_head`=False: the format {format} stores a copy of the target's lm_head, which counts as the "
            "head's own when the head is read again."
        )


def _compared(config: EagleConfig, target: TargetFiles | None) -> dict[str, Any]:
    """What must be equal before and after, by name and in one spelling."""
    left_out = (*_COMPARED_ELSEWHERE, *_ABOUT_READING)
    fields = {name: getattr(config, name) for name in EagleConfig.__annotations__ if name not in left_out}
    fields["recipe"] = json.loads(json.dumps(config.recipe))
    if config.default_tree is not None:
        fields["default_tree"] = json.loads(json.dumps(as_tree(config.default_tree).to_dict()))
    fields["draft_vocab_size"] = config.num_draft_tokens
    if config.num_aux_features:
        known = None if target is None else config.aux_boundaries(target.num_layers)
        fields["aux_layer_ids"] = known or boundaries(config, None)
    return fields | {f"text_config.{name}": value for name, value in _compared_layers(config.text_config).items()}


def _compared_layers(layers: Any) -> dict[str, Any]:
    fields = {name: getattr(layers, name, None) for name in (*LAYER_FIELDS, "rope_parameters", "sliding_window")}
    window, types = fields.pop("sliding_window"), getattr(layers, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * layers.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in types]
    rope = {name: value for name, value in layers.rope_parameters.items() if value is not None}
    return fields | {
        "attention_bias": bool(fields["attention_bias"]),
        "mlp_bias": bool(fields["mlp_bias"]),
        "head_dim": fields["head_dim"] or layers.hidden_size // layers.num_attention_heads,
        "rope_parameters": rope,
        "sliding_window": windows,
    }
