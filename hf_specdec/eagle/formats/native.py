"""Our own format: `EagleConfig` as config.json, and the head's weights under the names they have in `EagleHead`."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

from ...checkpoints.keys import Keys
from ...checkpoints.published import PublishedHead
from ...checkpoints.reading import Checkpoint
from ...checkpoints.vocabulary import draft_vocabulary
from ..configuration_eagle import EagleConfig


NAME = "hf_specdec"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config is an `EagleConfig`."""
    return checkpoint.config.get("model_type") == EagleConfig.model_type


def read(checkpoint: Checkpoint) -> PublishedHead:
    """
    Reads a head in our own format, in which nothing has to be guessed or assumed.

    Raises:
        ValueError: if a field of the config has an impossible value.
    """
    keys = Keys(checkpoint)
    try:
        config = EagleConfig.from_dict(dict(checkpoint.config))
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.name}: config.json: {error}") from error
    if "d2t" in keys and "lm_head.weight" in keys:
        draft_vocabulary(keys, config.vocab_size)
    return PublishedHead(config, keys.weights, keys.ignored)
