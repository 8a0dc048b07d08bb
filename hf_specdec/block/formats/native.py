"""Our own format: `BlockConfig` as config.json, and the head's weights under the names they have in `BlockHead`."""

from __future__ import annotations

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, own_config
from ...checkpoints.reading import Checkpoint
from ..configuration_block import BlockConfig
from .backbone import KIND, read_draft_vocabulary


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config is a `BlockConfig`."""
    return checkpoint.config.get("model_type") == BlockConfig.model_type


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in our own format.

    Raises:
        ValueError: if a field of the config has an impossible value.
    """
    keys = Keys(checkpoint, kind=KIND)
    config = own_config(checkpoint, BlockConfig)
    if "d2t" in keys:
        read_draft_vocabulary(keys, config.vocab_size)
    return PublishedHead(config, keys.weights, keys.ignored)
