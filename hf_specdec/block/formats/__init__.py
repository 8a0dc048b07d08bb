"""
The formats that block heads are published in, one module each.

`read_block` detects the format and turns the checkpoint into a `BlockConfig` and weights under the names of
`BlockHead`. The weights decide what a head has; which row predicts which token, which rows see which and the layers of
the target are the format's word.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.carried import carried_fields, check_round_trip, with_carried_fields
from ...checkpoints.kinds import refuse_other_kinds
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint, HubOptions, without_prefix
from ...checkpoints.target_files import TargetFiles
from . import deepspec, native, peagle, specforge, speculators, zlab
from .mask_embedding import with_mask_embedding
from .writing import compared_with


if TYPE_CHECKING:
    from ..modeling_block import BlockHead

__all__ = ["WRITERS", "read_block", "read_block_files", "write_block"]

# z-lab's format is that of many others, and is taken where no other format matches.
_FORMATS = (native, peagle, speculators, deepspec, specforge)
WRITERS = {module.NAME: module for module in (zlab, deepspec, speculators)}


def read_block_files(name: str, options: HubOptions) -> PublishedHead:
    """`read_block` for a folder or Hub repository, with what formats keep in files beside the weights."""
    return read_block(with_mask_embedding(Checkpoint.read(name, options), options))


def read_block(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a checkpoint of any format.

    Raises:
        ValueError: if the checkpoint is no block head, one of an unknown kind, or damaged; the message names the key.
    """
    checkpoint = without_prefix(checkpoint)
    refuse_other_kinds(checkpoint.name, "block", checkpoint.config, checkpoint.weights)
    _refuse_unread_kinds(checkpoint)
    format = next((format for format in _FORMATS if format.matches(checkpoint)), zlab)
    return with_carried_fields(format.read(checkpoint), checkpoint)


def write_block(head: BlockHead, folder: str | Path, format: str, target: TargetFiles | None = None) -> Path:
    """
    Writes a head in another format than ours (which `head.save_pretrained` writes). Fields of the config that have no
    place in the format, and on which no logits depend (such as `default_tree`), go into an object `hf_specdec` of
    config.json, which other libraries ignore. A copy of the target's embeddings or lm_head counts as the head's own
    when it is read again, and is logged.

    Args:
        head (`BlockHead`): the head.
        folder (`str`): the folder to write to, created if there is none.
        format (`str`): one of `WRITERS`.
        target (`TargetFiles`, *optional*): the target's files, for formats that copy its tensors or name its layers.

    Returns:
        `Path`: the file with the weights.

    Raises:
        ValueError: if the format is unknown, cannot hold the head, or needs the target, or if the head was trained for
            a target of another depth; nothing is written then.
    """
    if format not in WRITERS:
        raise ValueError(f"`format` must be one of {', '.join(map(repr, WRITERS))}, but is {format!r}.")
    depth = head.config.num_target_layers
    if target is not None and depth is not None and depth != target.num_layers:
        raise ValueError(
            f"`target`={target.name!r} has {target.num_layers} layers, but the head was trained for a target of "
            f"{depth} (`num_target_layers`). Name the head's own target; if its config.json is wrong, load the head "
            "with num_target_layers=None."
        )
    writing = WRITERS[format].write(head, target)
    writing.config |= carried_fields(head.config, None if target is None else target.name)
    check_round_trip(head.config, read_block(writing.as_checkpoint()).config, format, target, compared_with)
    return writing.save(folder)


def _refuse_unread_kinds(checkpoint: Checkpoint) -> None:
    """Refuses relatives of the known heads by name, which share their tensors but compute something else with them."""
    if any("prefix_gru." in key for key in checkpoint.weights):
        raise ValueError(
            f"{checkpoint.name}: `prefix_gru.…`: a Domino head, whose logits go through a recurrent cell along the "
            "drafted prefix. This version does not read it; it reads DFlash, DSpark, DFlash 2 and P-EAGLE heads."
        )
    known = ("dflash", "dspark", "jetspec", "peagle", "eagle3", "blockhead")
    for name in checkpoint.config.get("architectures") or ():
        if not any(part in str(name).lower() for part in known):
            raise ValueError(
                f"{checkpoint.name}: `architectures`=[{name!r}] in config.json is no block head that this version "
                "reads: those are DFlash, JetSpec, DSpark, DFlash 2 and P-EAGLE heads."
            )
