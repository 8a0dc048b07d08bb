"""Biases of tokens in captured steps: what logits processors add to scores, and which tokens they hide or force."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process as processors_of

from ..compat import biases_whole_texts


FOR_EVER = sys.maxsize
MOST_HIDDEN = 32
"""Most biases of a row in steps that hide tokens by their ids and do no more with them."""
MOST_BIASES = 1024
"""Most biases of a row in a captured step."""
MOST_BEFORE = 7
"""Most tokens that a text must end with for a bias, and for an n-gram but its last token."""
_LARGEST = torch.finfo(torch.float32).max
HIDDEN_TOKENS, BIASES, FORCED, ENDINGS = "hidden_tokens", "biases", "forced", "endings"
"""
What `Warpers.kinds` calls biases: any, of which most hide tokens; finite ones, or more than `MOST_HIDDEN`; those that
force tokens; and those that depend on the tokens before.
"""


class Bias(NamedTuple):
    """
    What is added to the score of a token, as long as the text has `first` tokens or more, and fewer than `end`, and
    ends with `before`, the last token first. -inf hides the token; infinity forces it: it gets the score 0, and tokens
    that are not forced are hidden.
    """

    token: int
    value: float
    first: int = 0
    end: int = FOR_EVER
    before: tuple[int, ...] = ()


def kinds_of(biases: tuple[Bias, ...]) -> set[str]:
    """What steps do for a row with these biases, by name."""
    found = {HIDDEN_TOKENS} if biases else set()
    found |= {FORCED} if any(one.value == math.inf for one in biases) else set()
    found |= {ENDINGS} if any(one.before for one in biases) else set()
    is_more = len(biases) > MOST_HIDDEN or any(math.isfinite(one.value) for one in biases)
    return found | ({BIASES} if is_more else set())


class RowBiasList:
    """
    The biases of a row's processors, one after the other.

    Args:
        padding (`int`): tokens before the row's text that its processors count.
    """

    def __init__(self, padding: int = 0):
        self._padding = padding
        self._found: list[Bias] = []
        self.has_forced = False
        """Whether any token is forced."""

    def take(self, processor: Any, is_first: bool, vocab_size: int | None = None) -> bool:
        """
        Adds the biases of a processor of `BIASES_BY`. Returns whether captured steps can do what it does.

        Args:
            is_first (`bool`): whether no processor before it moves scores.
            vocab_size (`int`, *optional*): number of the target's tokens.
        """
        new = BIASES_BY[type(processor)](processor)
        if isinstance(processor, processors_of.SequenceBiasLogitsProcessor):
            is_whole = self._padding and any(one.before for one in new)
            is_unknown = vocab_size is not None and any(max(one.token, *one.before, 0) >= vocab_size for one in new)
            if is_whole or is_unknown or any(len(one.before) > MOST_BEFORE for one in new):
                return False
        if any(math.isfinite(one.value) for one in new):
            # They are added to the scores as they are, in one sum.
            if not is_first or self.has_forced or any(math.isfinite(one.value) for one in self._found):
                return False
        forced = [one for one in new if one.value == math.inf]
        if forced and isinstance(processor, processors_of.SequenceBiasLogitsProcessor):
            return False
        if any(not abs(one.value) <= _LARGEST and abs(one.value) != math.inf for one in new):
            return False
        for one in forced:
            self._found = [part for earlier in self._found for part in _without(earlier, one)]
        self._found += new
        self.has_forced |= bool(forced)
        return True

    def joined(self) -> tuple[Bias, ...] | None:
        """
        All biases, with one entry for tokens that are hidden from the same beginning on: both minimum lengths hide the
        end tokens. None if there are too many.
        """
        ends: dict[tuple[int, float, int, tuple[int, ...]], int] = {}
        for token, value, first, end, before in self._found:
            key = token, value, first, before
            ends[key] = max(ends.get(key, 0), end)
        found = tuple(
            Bias(token, value, first, end, before)
            for (token, value, first, before), end in ends.items()
            if token >= 0 and first < end
        )
        return found if len(found) <= MOST_BIASES else None


def _without(bias: Bias, forced: Bias) -> list[Bias]:
    """A bias where it does not hide a token that is forced after it, or force others beside it."""
    if not (bias.value == math.inf or (bias.token == forced.token and bias.value == -math.inf)):
        return [bias]
    parts = bias._replace(end=min(bias.end, forced.first)), bias._replace(first=max(bias.first, forced.end))
    return [part for part in parts if part.first < part.end]


def _ends_until(length: Callable[[Any], int]) -> Callable[[Any], list[Bias]]:
    """End tokens of a processor, hidden in shorter texts."""
    return lambda processor: [Bias(end, -math.inf, 0, length(processor)) for end in processor.eos_token_id.tolist()]


def _suppressed(processor: Any) -> list[Bias]:
    return [Bias(token, -math.inf) for token in processor.suppress_tokens.tolist()]


def _suppressed_at_begin(processor: Any) -> list[Bias]:
    begin = processor.begin_index
    return [Bias(token, -math.inf, begin, begin + 1) for token in processor.begin_suppress_tokens.tolist()]


def _sequences(processor: Any) -> list[Bias]:
    found = []
    for (*before, token), value in processor.sequence_bias.items():
        first = 0 if biases_whole_texts() or not before else len(before) + 1
        found.append(Bias(token, value, first, before=tuple(reversed(before))))
    return found


def _forced_first(processor: Any) -> list[Bias]:
    return [Bias(processor.bos_token_id, math.inf, 1, 2)]


def _forced_last(processor: Any) -> list[Bias]:
    length = processor.max_length - 1
    return [Bias(token, math.inf, length, length + 1) for token in processor.eos_token_id.tolist()]


BIASES_BY: dict[type, Callable[[Any], list[Bias]]] = {
    processors_of.SequenceBiasLogitsProcessor: _sequences,
    processors_of.NoBadWordsLogitsProcessor: _sequences,
    processors_of.SuppressTokensLogitsProcessor: _suppressed,
    processors_of.SuppressTokensAtBeginLogitsProcessor: _suppressed_at_begin,
    processors_of.MinLengthLogitsProcessor: _ends_until(lambda processor: processor.min_length),
    processors_of.MinNewTokensLengthLogitsProcessor: _ends_until(
        lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens
    ),
    processors_of.ForcedBOSTokenLogitsProcessor: _forced_first,
    processors_of.ForcedEOSTokenLogitsProcessor: _forced_last,
}
"""Biases of the logits processors that only have such, by class."""
