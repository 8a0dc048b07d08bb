"""
The formats that block heads are published in, one module each.

`read_block` detects the format and turns the checkpoint into a `BlockConfig` and weights under the names of
`BlockHead`. The weights decide what a head has; which row predicts which token, which rows see which and the layers of
the target are the format's word.
"""

from __future__ import annotations

from ...checkpoints.kinds import refuse_other_kinds
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint, without_prefix
from . import deepspec, native, peagle, specforge, speculators, zlab


__all__ = ["read_block"]

# z-lab's format is that of many others, and is taken where no other format matches.
_FORMATS = (native, peagle, speculators, deepspec, specforge)


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
    return format.read(checkpoint)


def _refuse_unread_kinds(checkpoint: Checkpoint) -> None:
    """Refuses relatives of the known heads by name, which share their tensors but compute something else with them."""
    if any("prefix_gru." in key for key in checkpoint.weights):
        raise ValueError(
            f"{checkpoint.name}: `prefix_gru.…`: a Domino head, whose logits go through a recurrent cell along the "
            "drafted prefix. This version does not read it; it reads DFlash, DSpark, DFlash 2 and P-EAGLE heads."
        )
    if "mask_embedding" in checkpoint.weights:
        raise ValueError(
            f"{checkpoint.name}: `mask_embedding`: an embedding of the mask that is no row of the vocabulary's. This "
            "version reads heads whose mask is a token (`mask_token_id`)."
        )
    known = ("dflash", "dspark", "jetspec", "peagle", "eagle3", "blockhead")
    for name in checkpoint.config.get("architectures") or ():
        if not any(part in str(name).lower() for part in known):
            raise ValueError(
                f"{checkpoint.name}: `architectures`=[{name!r}] in config.json is no block head that this version "
                "reads: those are DFlash, JetSpec, DSpark, DFlash 2 and P-EAGLE heads."
            )
