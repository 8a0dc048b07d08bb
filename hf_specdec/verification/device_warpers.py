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
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from .filters import AFTER, BEFORE, OFF, TOP_H_CANDIDATES
from .penalties import OccurrencePenalty


HIDDEN_TOKENS, PENALTIES = "hidden_tokens", "penalties"
"""What `Warpers.kinds` calls tokens that are hidden whatever their scores are, and penalties of a text's tokens."""
_UNPENALISED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "counts_from": 0}
RENORMALIZES = "renormalize_logits"
"""A warper that leaves p as it is."""
MOST_HIDDEN = 32
"""Most tokens that a row of a captured step hides by their ids."""
FOR_EVER = sys.maxsize
NONE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | OFF | _UNPENALISED
"""
Values of a row without warpers, by name: options of `generate` and of requests, and the first token that presence and
frequency penalties count.
"""
INTEGERS = ("top_k", "counts_from")


class Hidden(NamedTuple):
    """A token that is hidden as long as the text has `first` tokens or more, and fewer than `end`."""

    token: int
    first: int
    end: int


@dataclass(frozen=True)
class Warpers:
    """
    What a request's processors do that captured steps can do, too: penalties first, then tokens are hidden.

    Args:
        values (`dict[str, float]`): values by name, for the processors among those of `NONE`.
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
            kind = type(processor)
            is_early = values.keys() <= _UNPENALISED.keys()  # penalties do nothing to a hidden token
            if kind in _HIDDEN_BY and is_early:
                hidden += _HIDDEN_BY[kind](processor)
            elif kind is RepetitionPenaltyLogitsProcessor and not values and not _ignores_tokens(processor):
                values["repetition_penalty"] = processor.penalty
            elif kind is OccurrencePenalty and is_early and "counts_from" not in values:
                values["presence_penalty"], values["frequency_penalty"] = processor.presence, processor.frequency
                values["counts_from"] = processor.prompt_length
            elif kind in _NAMES and _is_plain(processor) and _is_in_order(_NAMES[kind], values):
                value = getattr(processor, _FIELDS.get(_NAMES[kind], _NAMES[kind]), 1.0)
                values[_NAMES[kind]] = value.item() if isinstance(value, torch.Tensor) else value
            else:
                return None
        hidden = _joined(hidden)
        return cls(values, tuple(hidden)) if len(hidden) <= MOST_HIDDEN else None

    @cached_property
    def kinds(self) -> frozenset[str]:
        """What the steps of the request do beside temperature, top-k and top-p, by name."""
        found = self.values.keys() & OFF.keys()
        found |= {HIDDEN_TOKENS} if self.hidden else set()
        return frozenset(found | ({PENALTIES} if self.values.keys() & _UNPENALISED.keys() else set()))

    @cached_property
    def of_draws(self) -> frozenset[str]:
        """Names of the values that say how a token is drawn: greedy requests have none."""
        return frozenset(self.values.keys() - _UNPENALISED.keys())


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


def _is_in_order(name: str, values: dict[str, float]) -> bool:
    return all(_ORDER.get(one, -1) < _ORDER[name] for one in values)


def _ignores_tokens(processor: Any) -> bool:
    """Whether a repetition penalty leaves tokens at the beginning of a text out."""
    length = getattr(processor, "prompt_ignore_length", None)
    return length.tolist() != [0] if isinstance(length, torch.Tensor) else length not in (None, 0)


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
    """Hidden tokens, with one entry for those of a token and a beginning: both minimum lengths hide the end tokens."""
    ends: dict[tuple[int, int], int] = {}
    for token, first, end in hidden:
        ends[token, first] = max(ends.get((token, first), 0), end)
    return [Hidden(token, first, end) for (token, first), end in ends.items() if token >= 0 and first < end]


_COUNTS = {
    processors_of.MinLengthLogitsProcessor: "min_length",
    processors_of.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    processors_of.SuppressTokensAtBeginLogitsProcessor: "begin_index",
    RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",  # older ones take padding for a token of the text
}
"""Processors with an attribute that is a number of tokens from the beginning of a text on."""


def without_padding(processor: Any, row: int, padding: int) -> Any:
    """A logits processor for the text of a row without the padding before it, which it counts among its tokens."""
    name = _COUNTS.get(type(processor))
    if name is None:
        return processor
    count = getattr(processor, name, None)
    if isinstance(count, torch.Tensor):
        count = int(count[row])
    elif not padding:
        return processor
    own = copy.copy(processor)
    setattr(own, name, (count or 0) - padding)
    return own
