"""Our own format: `EagleConfig` as config.json, and the head's weights under the names they have in `EagleHead`."""

from __future__ import annotations

from ..configuration_eagle import EagleConfig
from .checkpoint import Checkpoint
from .reading import Keys, Reading


NAME = "hf_specdec"


def matches(checkpoint: Checkpoint) -> bool:
    """Whether the config is an `EagleConfig`."""
    return checkpoint.config.get("model_type") == EagleConfig.model_type


def read(checkpoint: Checkpoint) -> Reading:
    """Nothing to be told or assumed."""
    keys = Keys(checkpoint)
    return Reading(EagleConfig.from_dict(dict(checkpoint.config)), keys.weights, keys.ignored)
