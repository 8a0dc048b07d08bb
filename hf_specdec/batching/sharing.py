"""Which requests do the same to their scores, and can do it together."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from transformers import LogitsProcessorList

from ..verification.processors import READS_SCORES_ONLY


def sharing_key(processors: LogitsProcessorList) -> Hashable:
    """
    Equal (a tuple) for lists of processors that read the scores alone and do the same; of its own (the list's id) for
    any other.
    """
    parts = []
    for processor in processors:
        values = _plain_values(processor) if type(processor) in READS_SCORES_ONLY else None
        if values is None:
            return id(processors)
        parts.append((type(processor), values))
    return tuple(parts)


def _plain_values(processor: Any) -> tuple | None:
    """What a processor holds, if these are numbers: it can be told by them."""
    values = tuple(sorted(vars(processor).items()))
    return values if all(isinstance(value, int | float) for _, value in values) else None
