"""The reasons for which a class of models is refused, as targets or as drafts."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """What a message says of the model; it may go on with details."""

    POSITIONS = "takes no `position_ids`"
    MASK = "takes no mask of a tree"
    CROSS_ATTENTION = "has cross-attention that needs a new mask for every token"
    SPARSE = "has sparse attention"
    STATES = "has recurrent or convolutional layers"
    CACHE = "takes no cache"
    ONE_TOKEN = "reads one token at a time behind a cache"
    OTHER_TOKENS = "reads other tokens than those of the text"
    LOOP = "has a decoding loop of its own"
    ENCODER = "is an encoder-decoder model"

    @classmethod
    def of(cls, message: str) -> Reason | None:
        """The reason that a message gives first; None, if it gives none."""
        found = [(place, reason) for reason in cls if (place := message.find(reason.value)) >= 0]
        return min(found, key=lambda one: one[0])[1] if found else None
