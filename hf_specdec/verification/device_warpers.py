"""Warpers that captured steps apply on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Warpers:
    """
    The warpers of a sampling call.

    Args:
        values (`dict[str, float]`): values by name, for the call's warpers among `temperature`, `top_k` and `top_p`.
    """

    values: dict[str, float]

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> Warpers | None:
        """
        The warpers of a call's logits processors; None if other processors, options or another order are among them.
        """
        values: dict[str, float] = {}
        for processor in processors:
            kind, order = type(processor), tuple(values)
            if kind is TemperatureLogitsWarper and not order:
                values["temperature"] = processor.temperature
            elif kind in (TopKLogitsWarper, TopPLogitsWarper):
                name = "top_k" if kind is TopKLogitsWarper else "top_p"
                # `TopKLogitsWarper` holds the larger of k and `min_tokens_to_keep`.
                is_plain = processor.filter_value == -torch.inf and getattr(processor, "min_tokens_to_keep", 1) == 1
                if not is_plain or name in order or "top_p" in order:
                    return None
                values[name] = getattr(processor, name)
            else:
                return None
        return cls(values)
