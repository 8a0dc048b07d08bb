"""Our own format: `EagleConfig` as config.json, and the head's weights under the names they have in `EagleHead`."""

from __future__ import annotations

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead, own_config
from ...checkpoints.reading import Checkpoint
from ...checkpoints.vocabulary import draft_vocabulary
from ..configuration_eagle import EagleConfig


NAME = "hf_specdec"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config is an `EagleConfig`."""
    return checkpoint.config.get("model_type") == EagleConfig.model_type


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in our own format.

    Raises:
        ValueError: if a field of the config has an impossible value.
    """
    keys = Keys(checkpoint)
    config = own_config(checkpoint, EagleConfig)
    if "d2t" in keys and "lm_head.weight" in keys:
        draft_vocabulary(keys, config.vocab_size)
    return PublishedHead(config, keys.weights, keys.ignored)
