"""Logits processors that captured steps apply on the device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors_of
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from .biases import BIASES_BY, ENDINGS, MOST_BEFORE, Bias, RowBiasList, kinds_of
from .filters import AFTER, BEFORE, OFF, TOP_H_CANDIDATES
from .penalties import OccurrencePenalty


PENALTIES, NGRAMS = "penalties", "ngrams"
"""What `Warpers.kinds` calls penalties of a text's tokens, and n-grams that may not come again."""
TEXTS = frozenset({PENALTIES, NGRAMS, ENDINGS})
"""Kinds that look at the tokens of texts."""
_UNPENALISED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "counts_from": 0}
_EARLY = _UNPENALISED | {"no_repeat_ngram_size": 0}
RENORMALIZES = "renormalize_logits"
"""A warper that leaves p as it is."""
NONE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | OFF | _EARLY
"""
Values of a row without warpers, by name: options of `generate` and of requests, and the first token that presence and
frequency penalties count.
"""
INTEGERS = ("top_k", "counts_from", "no_repeat_ngram_size")


@dataclass(frozen=True)
class Warpers:
    """
    What a request's processors do that captured steps can do, too, in this order: finite biases, penalties, n-grams,
    tokens that are forced, tokens that are hidden, and the values that say how a token is drawn.

    Args:
        values (`dict[str, float]`): values by name, for the processors among those of `NONE`.
        biases (`tuple[Bias, …]`): what is added to the scores of tokens.
    """

    values: dict[str, float]
    biases: tuple[Bias, ...] = ()

    @classmethod
    def of(cls, processors: LogitsProcessorList, vocab_size: int | None = None, padding: int = 0) -> Warpers | None:
        """
        The warpers of a call's logits processors; None if other processors, options or another order are among them.

        Args:
            vocab_size (`int`, *optional*): number of the target's tokens. What names others is left to transformers,
                which refuses some of it.
            padding (`int`): tokens before the row's text that its processors count, and captured steps do not have.
        """
        values: dict[str, float] = {}
        biases = RowBiasList(padding)
        for processor in processors:
            kind = type(processor)
            is_early = values.keys() <= _EARLY.keys()
            if kind in BIASES_BY:
                if not is_early or not biases.take(processor, is_first=not values, vocab_size=vocab_size):
                    return None
            elif kind is RepetitionPenaltyLogitsProcessor and not values and not _ignores_tokens(processor):
                values["repetition_penalty"] = processor.penalty
            elif kind is NoRepeatNGramLogitsProcessor and is_early and "no_repeat_ngram_size" not in values:
                values["no_repeat_ngram_size"] = processor.ngram_size
                if padding or processor.ngram_size > MOST_BEFORE + 1:
                    return None
            elif kind is OccurrencePenalty and is_early and "counts_from" not in values:
                values["presence_penalty"], values["frequency_penalty"] = processor.presence, processor.frequency
                values["counts_from"] = processor.prompt_length
            elif kind in _NAMES and _is_plain(processor) and _is_in_order(_NAMES[kind], values):
                value = getattr(processor, _FIELDS.get(_NAMES[kind], _NAMES[kind]), 1.0)
                values[_NAMES[kind]] = value.item() if isinstance(value, torch.Tensor) else value
            else:
                return None
            if biases.has_forced and kind in _BEFORE_FORCED:
                return None
        found = biases.joined()
        return None if found is None else cls(values, found)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """What the steps of the request do beside temperature, top-k and top-p, by name."""
        found = (self.values.keys() & OFF.keys()) | kinds_of(self.biases)
        found |= {PENALTIES} if self.values.keys() & _UNPENALISED.keys() else set()
        return frozenset(found | ({NGRAMS} if "no_repeat_ngram_size" in self.values else set()))

    @cached_property
    def of_draws(self) -> frozenset[str]:
        """Names of the values that say how a token is drawn: greedy requests have none."""
        return frozenset(self.values.keys() - _EARLY.keys())


_BEFORE_FORCED = (RepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor, OccurrencePenalty)
"""Processors that would change the score of a token that one before them has forced."""
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


_COUNTS = {
    processors_of.ForcedEOSTokenLogitsProcessor: "max_length",
    processors_of.MinLengthLogitsProcessor: "min_length",
    processors_of.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    processors_of.SuppressTokensAtBeginLogitsProcessor: "begin_index",
    RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",  # older ones take padding for a token of the text
}
"""Processors with an attribute that is a number of tokens from the beginning of a text on."""


def without_padding(processor: Any, row: int, padding: int) -> Any | None:
    """
    A logits processor for the text of a row without the padding before it, which it counts among its tokens; None if
    it does nothing behind padding.
    """
    if padding and type(processor) is processors_of.ForcedBOSTokenLogitsProcessor:
        return None  # padding is the first token of the text
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
