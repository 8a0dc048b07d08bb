"""Decides which draft tokens are kept, so that the output is distributed as the target's own."""

from .choosing import choose
from .distribution import TargetDistribution, TextRow
from .draft_temperature import DraftTemperature
from .nan_logits import NAN_LOGITS, DraftBackoff, rows_with_nan
from .position_noise import BatchNoise, DeviceNoise, NoiseSeed, PositionNoise, draw_by_position
from .processor_kinds import warpers_of
from .processors_by_row import copies_per_row
from .rejection import walk_by_rejection
from .target import walk_target
from .verifier import Verifier
from .walk import Walk, new_tokens


__all__ = [
    "NAN_LOGITS",
    "BatchNoise",
    "DeviceNoise",
    "DraftBackoff",
    "DraftTemperature",
    "NoiseSeed",
    "PositionNoise",
    "TargetDistribution",
    "TextRow",
    "Verifier",
    "Walk",
    "choose",
    "copies_per_row",
    "draw_by_position",
    "new_tokens",
    "rows_with_nan",
    "walk_by_rejection",
    "walk_target",
    "warpers_of",
]
