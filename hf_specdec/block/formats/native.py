"""Our own format: `BlockConfig` as config.json, and the head's weights under the names they have in `BlockHead`."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint
from ..configuration_block import BlockConfig
from .backbone import KIND, read_draft_vocabulary


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config is a `BlockConfig`."""
    return checkpoint.config.get("model_type") == BlockConfig.model_type


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in our own format, in which nothing has to be guessed or assumed.

    Raises:
        ValueError: if a field of the config has an impossible value.
    """
    keys = Keys(checkpoint, kind=KIND)
    try:
        config = BlockConfig.from_dict(dict(checkpoint.config))
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.name}: config.json: {error}") from error
    if "d2t" in keys:
        read_draft_vocabulary(keys, config.vocab_size)
    return PublishedHead(config, keys.weights, keys.ignored)
