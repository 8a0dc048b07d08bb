"""Keys of logits processor lists: requests with equal keys are processed in one call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from transformers import LogitsProcessorList

from ..verification.processor_kinds import READS_SCORES_ONLY


def sharing_key(processors: LogitsProcessorList) -> Hashable:
    """
    The key of a list of processors: a tuple, equal for lists of the same processors with the same values, if all of
    them read only the scores; otherwise the list's own id.
    """
    parts = []
    for processor in processors:
        values = _plain_values(processor) if type(processor) in READS_SCORES_ONLY else None
        if values is None:
            return id(processors)
        parts.append((type(processor), values))
    return tuple(parts)


def _plain_values(processor: Any) -> tuple | None:
    """The sorted attributes of a processor, which identify it if all of them are numbers; else None."""
    values = tuple(sorted(vars(processor).items()))
    return values if all(isinstance(value, int | float) for _, value in values) else None
