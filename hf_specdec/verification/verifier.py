"""`Verifier`: how the draft tokens of a row are verified."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from ..trees import DraftTree
from .rejection import walk_by_rejection
from .target import walk_target
from .walk import Walk


if TYPE_CHECKING:
    from .distribution import TargetDistribution

Observe = Callable[[torch.Tensor, torch.Tensor], None]


class Verifier(IntEnum):
    """
    How a row is verified: not at all (`RESTS`), along the argmax, along tokens drawn from p, by rejection, or along
    tokens drawn from p by the noise of their positions (`PositionNoise`).
    """

    RESTS = 0
    GREEDY = 1
    FROM_TARGET = 2
    REJECTION = 3
    BY_POSITION = 4

    def walk(
        self, draft: DraftTree, distribution: TargetDistribution, rows: list[int], observe: Observe | None = None
    ) -> Walk:
        """Walks these rows down their trees on the host; see `walk_target` and `walk_by_rejection`."""
        if self == Verifier.REJECTION:
            return walk_by_rejection(draft, distribution, rows, observe)
        return walk_target(draft, distribution, rows, self != Verifier.GREEDY)
