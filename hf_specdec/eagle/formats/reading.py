"""What every format is turned into: an `EagleConfig`, weights under our names, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..configuration_eagle import EagleConfig


@dataclass(eq=False)
class Reading:
    """
    A checkpoint, read.

    Args:
        config (`EagleConfig`): the head.
        weights (`dict[str, torch.Tensor]`): by the names of `EagleHead`.
        ignored (`list[str]`): published keys that are not needed.
    """

    config: EagleConfig
    weights: dict[str, torch.Tensor] = field(repr=False)
    ignored: list[str] = field(default_factory=list)


def section(config: dict[str, Any], name: str, checkpoint: str, required: bool = False) -> dict[str, Any]:
    """
    A nested part of a published config; empty if it is not there and not `required`.

    Raises:
        ValueError: if it is not an object, or missing though `required`.
    """
    value = config.get(name)
    if value is None and not required:
        return {}
    if not isinstance(value, dict):
        found = "is missing" if value is None else f"is {value!r}"
        raise ValueError(f"{checkpoint}: `{name}` in config.json must be an object, but {found}.")
    return value
