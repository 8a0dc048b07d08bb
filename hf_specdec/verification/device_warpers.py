"""Logits processors that captured steps apply on the device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors_of

from .filters import AFTER, BEFORE, OFF, TOP_H_CANDIDATES


HIDDEN_TOKENS = "hidden_tokens"
"""What `Warpers.kinds` calls tokens that are hidden whatever their scores are."""
RENORMALIZES = "renormalize_logits"
"""A warper that leaves p as it is."""
MOST_HIDDEN = 32
"""Most tokens that a row of a captured step hides by their ids."""
FOR_EVER = sys.maxsize
NONE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | OFF
"""Values of a row without warpers, by name. The names are options of `generate`, in the order of their warpers."""


class Hidden(NamedTuple):
    """A token that is hidden as long as the text has `first` tokens or more, and fewer than `end`."""

    token: int
    first: int
    end: int


@dataclass(frozen=True)
class Warpers:
    """
    What a request's processors do that captured steps can do, too: tokens are hidden first.

    Args:
        values (`dict[str, float]`): values by name, for the warpers among those of `NONE`.
        hidden (`tuple[Hidden, …]`): tokens that are hidden whatever their scores are.
    """

    values: dict[str, float]
    hidden: tuple[Hidden, ...] = ()

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> Warpers | None:
        """
        The warpers of a call's logits processors; None if other processors, options or another order are among them.
        """
        values: dict[str, float] = {}
        hidden: list[Hidden] = []
        for processor in processors:
            name = _NAMES.get(type(processor))
            tokens = _HIDDEN_BY.get(type(processor))
            if tokens is not None and not values:
                hidden += tokens(processor)
            elif name is not None and _is_plain(processor) and all(_ORDER[one] < _ORDER[name] for one in values):
                value = getattr(processor, _FIELDS.get(name, name), 1.0)
                values[name] = value.item() if isinstance(value, torch.Tensor) else value
            else:
                return None
        hidden = _joined(hidden)
        return cls(values, tuple(hidden)) if len(hidden) <= MOST_HIDDEN else None

    @cached_property
    def kinds(self) -> frozenset[str]:
        """What the steps of the request do beside temperature, top-k and top-p, by name."""
        return frozenset(self.values.keys() & OFF.keys()) | ({HIDDEN_TOKENS} if self.hidden else frozenset())


_ORDER = {n: place for place, n in enumerate(("temperature", *BEFORE, "top_k", "top_p", *AFTER, RENORMALIZES))}
_NAMES = {
    getattr(processors_of, kind): name
    for kind, name in {
        "TemperatureLogitsWarper": "temperature",
        "TopHLogitsWarper": "top_h",
        "TopKLogitsWarper": "top_k",
        "TopPLogitsWarper": "top_p",
        "MinPLogitsWarper": "min_p",
        "TypicalLogitsWarper": "typical_p",
        "EpsilonLogitsWarper": "epsilon_cutoff",
        "EtaLogitsWarper": "eta_cutoff",
        "LogitNormalization": RENORMALIZES,
    }.items()
}
_FIELDS = {"typical_p": "mass", "epsilon_cutoff": "epsilon", "eta_cutoff": "epsilon"}


def _is_plain(processor: Any) -> bool:
    """Whether a warper hides tokens completely, and keeps as few as one."""
    # `TopKLogitsWarper` holds the larger of k and `min_tokens_to_keep`.
    return (
        getattr(processor, "filter_value", -float("inf")) == -float("inf")
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "top_n", TOP_H_CANDIDATES) == TOP_H_CANDIDATES
    )


def _ends_until(length: Callable[[Any], int]) -> Callable[[Any], list[Hidden]]:
    """End tokens of a processor, hidden in shorter texts."""
    return lambda processor: [Hidden(token, 0, length(processor)) for token in processor.eos_token_id.tolist()]


def _suppressed(processor: Any) -> list[Hidden]:
    return [Hidden(token, 0, FOR_EVER) for token in processor.suppress_tokens.tolist()]


def _suppressed_at_begin(processor: Any) -> list[Hidden]:
    begin = processor.begin_index
    return [Hidden(token, begin, begin + 1) for token in processor.begin_suppress_tokens.tolist()]


_HIDDEN_BY: dict[type, Callable[[Any], list[Hidden]]] = {
    processors_of.SuppressTokensLogitsProcessor: _suppressed,
    processors_of.SuppressTokensAtBeginLogitsProcessor: _suppressed_at_begin,
    processors_of.MinLengthLogitsProcessor: _ends_until(lambda processor: processor.min_length),
    processors_of.MinNewTokensLengthLogitsProcessor: _ends_until(
        lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens
    ),
}


def _joined(hidden: list[Hidden]) -> list[Hidden]:
    """The same with one entry for those of a token and a beginning: both minimum lengths hide the end tokens."""
    ends: dict[tuple[int, int], int] = {}
    for token, first, end in hidden:
        ends[token, first] = max(ends.get((token, first), 0), end)
    return [Hidden(token, first, end) for (token, first), end in ends.items() if token >= 0 and first < end]


_COUNTS = {
    processors_of.MinLengthLogitsProcessor: "min_length",
    processors_of.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    processors_of.SuppressTokensAtBeginLogitsProcessor: "begin_index",
}
"""Processors that compare the length of a text with an attribute of theirs."""


def without_padding(processor: Any, padding: int) -> Any:
    """A logits processor for a text without the padding before it, which it counts among its tokens."""
    name = _COUNTS.get(type(processor))
    if name is None or not padding:
        return processor
    own = copy.copy(processor)
    setattr(own, name, getattr(processor, name) - padding)
    return own
