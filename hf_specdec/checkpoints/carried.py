"""Fields of a head's config that a published format has no place for: carried along, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from ..trees import as_tree
from .published import PublishedHead, section
from .reading import Checkpoint
from .target_files import TargetFiles
from .writing import LAYER_FIELDS


logger = logging.get_logger(__name__)

# Our object in the config.json of other formats. Nothing in it changes the head's logits, so who ignores it reads the
# same head.
_SECTION = "hf_specdec"
_CARRIED = ("default_tree", "target_name", "recipe", "num_target_layers")


def carried_fields(config: PreTrainedConfig, target_name: str | None) -> dict[str, Any]:
    """
    The object `hf_specdec` for a config.json; empty if there is nothing to carry.

    Args:
        config (`PreTrainedConfig`): config of the head.
        target_name (`str`, *optional*): name of the target if it is given; else the config's.
    """
    tree = config.default_tree
    fields = {
        "default_tree": tree.to_dict() if hasattr(tree, "to_dict") else tree,
        "target_name": target_name or config.target_name,
        "recipe": config.recipe,
        "num_target_layers": getattr(config, "num_target_layers", None) if target_name is None else None,
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
        if getattr(reading.config, name, fields) is None:  # the format's own word counts more
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


def check_round_trip(
    config: Any, again: Any, format: str, target: TargetFiles | None, compared: Callable[..., dict[str, Any]]
) -> None:
    """
    Checks that a head that was written in a format is read again as the same head.

    Args:
        config (`PreTrainedConfig`): config of the head.
        again (`PreTrainedConfig`): config that is read from what is to be written.
        format (`str`): name of the format.
        target (`TargetFiles`, *optional*): the target's files, if they were given.
        compared (`Callable`): gives what must be equal before and after for a config and the target, by name and in
            one spelling.

    Raises:
        ValueError: naming the first field that would be lost.
    """
    check_same(compared(config, target), compared(again, target), format)
    check_same_tensors(config, again, format)


def check_same(before: dict[str, Any], after: dict[str, Any], format: str) -> None:
    """
    Checks that what is read again is what was to be written.

    Args:
        before, after (`dict`): the head's fields, see `compared_fields`.
        format (`str`): name of the format.

    Raises:
        ValueError: naming the first field that would be lost.
    """
    for name, value in before.items():
        if value != after[name]:
            raise ValueError(
                f"`{name}`={value!r}: the format {format} cannot say so, and the head would be read with "
                f"{after[name]!r}. Write it as hf_specdec."
            )


def check_same_tensors(config: PreTrainedConfig, again: PreTrainedConfig, format: str) -> None:
    """
    Checks that a head that shares tensors with its target is read so again, or with copies of them, which is logged.

    Raises:
        ValueError: if the head would use the target's in place of its own.
    """
    for field, tensor in (("has_embeddings", "embeddings"), ("has_lm_head", "lm_head")):
        before, after = getattr(config, field), getattr(again, field)
        if before and not after:
            raise ValueError(
                f"`{field}`=True: the format {format} cannot say so, and the head would use the target's. Write it as "
                "hf_specdec."
            )
        if after and not before:
            logger.warning(
                f"`{field}`=False: the format {format} stores a copy of the target's {tensor}, which counts as the "
                "head's own when the head is read again."
            )


def compared_fields(config: PreTrainedConfig, left_out: tuple[str, ...]) -> dict[str, Any]:
    """A config's fields, and those of its layers, by name and in one spelling, but for `left_out`."""
    fields = {name: getattr(config, name) for name in type(config).__annotations__ if name not in left_out}
    fields["recipe"] = json.loads(json.dumps(config.recipe))
    if config.default_tree is not None:
        fields["default_tree"] = json.loads(json.dumps(as_tree(config.default_tree).to_dict()))
    fields["draft_vocab_size"] = config.num_draft_tokens
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
