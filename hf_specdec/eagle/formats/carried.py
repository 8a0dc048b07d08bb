"""What of an EAGLE head must survive being written in a published format."""

from __future__ import annotations

from typing import Any

from ...checkpoints.carried import compared_fields
from ...checkpoints.target_files import TargetFiles
from ..configuration_eagle import EagleConfig
from .writing import boundaries


# Compared in one spelling, and those about the checkpoint that was read.
_COMPARED_ELSEWHERE = ("text_config", "aux_layer_ids", "aux_layer_convention", "has_lm_head")
_ABOUT_READING = ("source_format", "conventions")


def compared_with(config: EagleConfig, target: TargetFiles | None) -> dict[str, Any]:
    """What must be equal before and after, by name and in one spelling."""
    given = () if target is None else ("target_name",)  # which is the given target's afterwards
    fields = compared_fields(config, (*_COMPARED_ELSEWHERE, *_ABOUT_READING, *given))
    if config.num_aux_features:
        known = None if target is None else config.aux_boundaries(target.num_layers)
        fields["aux_layer_ids"] = known or boundaries(config, None)
    return fields
