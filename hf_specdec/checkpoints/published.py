"""`PublishedHead`, the result of reading any format: our config, weights under our names, and keys left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from .reading import Checkpoint


@dataclass(eq=False)
class PublishedHead:
    """
    A published head, converted to our format.

    Args:
        config (`PreTrainedConfig`): the head's configuration.
        weights (`dict[str, torch.Tensor]`): the tensors, by the names of our model.
        ignored (`dict[str, torch.Tensor]`): published tensors that are not needed, by the same names.
    """

    config: Any
    weights: dict[str, torch.Tensor] = field(repr=False)
    ignored: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def own_config(checkpoint: Checkpoint, kind: type[PreTrainedConfig]) -> Any:
    """
    The config of a head in our own format, in which nothing has to be guessed or assumed.

    Raises:
        ValueError: if a field has an impossible value.
    """
    try:
        return kind.from_dict(dict(checkpoint.config))
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.name}: config.json: {error}") from error


def section(config: dict[str, Any], name: str, checkpoint: str, required: bool = False) -> dict[str, Any]:
    """
    A nested object of a published config; empty if it is missing and not `required`.

    Raises:
        ValueError: if the value is no object, or is `required` and missing.
    """
    value = config.get(name)
    if value is None and not required:
        return {}
    if not isinstance(value, dict):
        found = "is missing" if value is None else f"is {value!r}"
        raise ValueError(f"{checkpoint}: `{name}` in config.json must be an object, but {found}.")
    return value


def verifier_name(checkpoint: Checkpoint) -> str | None:
    """The name of the model that a head in the format of speculators was trained for."""
    options = section(checkpoint.config, "speculators_config", checkpoint.name)
    return section(options, "verifier", checkpoint.name).get("name_or_path")
