"""
The formats that EAGLE heads are published in, one module each.

`read_head` detects the format and turns the checkpoint into an `EagleConfig` and weights under the names of
`EagleHead`. The weights decide what a head is wherever the configs of published heads are silent, ambiguous or wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.carried import carried_fields, check_round_trip, with_carried_fields
from ...checkpoints.kinds import refuse_other_kinds
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint, HubOptions, without_prefix
from ...checkpoints.target_files import TargetFiles
from . import angelslim, modelopt, native, safeailab, specforge, speculators
from .carried import compared_with


if TYPE_CHECKING:
    from ..modeling_eagle import EagleHead

__all__ = ["WRITERS", "Checkpoint", "HubOptions", "PublishedHead", "TargetFiles", "read_head", "write_head"]

# SafeAILab's format has no marks of its own, and is taken where no other format matches.
_FORMATS = (native, speculators, modelopt, specforge, angelslim)
WRITERS = {module.NAME: module for module in (safeailab, speculators, specforge)}


def read_head(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a checkpoint of any format.

    Raises:
        ValueError: if the checkpoint is not an EAGLE head, or damaged; the message names the key.
    """
    inner = checkpoint.config.get("model")
    if checkpoint.config.get("model_type") == "eagle" and isinstance(inner, dict):  # as vLLM wraps configs
        checkpoint = Checkpoint(checkpoint.name, inner, checkpoint.weights)
    checkpoint = without_prefix(checkpoint)
    refuse_other_kinds(checkpoint.name, "eagle", checkpoint.config, checkpoint.weights)
    format = next((format for format in _FORMATS if format.matches(checkpoint)), safeailab)
    return with_carried_fields(format.read(checkpoint), checkpoint)


def write_head(head: EagleHead, folder: str | Path, format: str, target: TargetFiles | None = None) -> Path:
    """
    Writes a head in another format than ours (which `head.save_pretrained` writes). Fields of the config that have no
    place in the format, and on which no logits depend (such as `default_tree`), go into an object `hf_specdec` of
    config.json, which other libraries ignore. A copy of the target's lm_head counts as the head's own when it is read
    again, and is logged.

    Args:
        head (`EagleHead`): the head.
        folder (`str`): the folder to write to, created if there is none.
        format (`str`): one of `WRITERS`.
        target (`TargetFiles`, *optional*): the target's files, for formats that copy its tensors or depend on its
            number of layers.

    Returns:
        `Path`: the file with the weights.

    Raises:
        ValueError: if the format is unknown, cannot hold the head, or needs the target; nothing is written then.
    """
    if format not in WRITERS:
        raise ValueError(f"`format` must be one of {', '.join(map(repr, WRITERS))}, but is {format!r}.")
    writing = WRITERS[format].write(head, target)
    writing.config |= carried_fields(head.config, None if target is None else target.name)
    check_round_trip(head.config, read_head(writing.as_checkpoint()).config, format, target, compared_with)
    return writing.save(folder)
