"""The tokens of an answer with their log-probabilities, in the forms of OpenAI's APIs."""

from __future__ import annotations

import codecs
import math
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..batching import SpeculativeGenerationOutput
from .decoding import beside
from .stop_strings import StopStringSearch, as_list
from .token_bytes import TokenBytes, token_bytes_of


UNLIKELY = -9999.0
"""Stands for a log-probability of -inf, which JSON has not."""


class ScoredToken(NamedTuple):
    """
    A token of an answer.

    Args:
        text (`bytes`): what it stands for.
        value (`float`): its log-probability.
        best (`list[tuple[bytes, float]]`): the best tokens in its place, with theirs.
        start (`int`): number of characters before it.
    """

    text: bytes
    value: float
    best: list[tuple[bytes, float]]
    start: int


class AnswerLogprobs:
    """
    Takes the tokens of an answer one by one, and gives those that are known to be part of its text: a stop string, and
    what comes after it, is none, and neither is the end token.

    Args:
        token_bytes (`TokenBytes`): of the model's tokenizer.
        stop_strings (`str` or `list[str]`, *optional*): what ends the text.
        special (`frozenset[int]`): the special tokens.
        has_parts (`bool`): whether special tokens are part of the answer, as delimiters of its parts.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stop_strings: str | list[str] | None,
        special: frozenset[int],
        has_parts: bool = False,
    ):
        self._bytes, self._special, self._has_parts = token_bytes, special, has_parts
        self._search = StopStringSearch(as_list(stop_strings))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True
        self._length = self._known = 0
        """Number of characters so far, and of those that are known to precede all stop strings."""
        self._waiting: list[ScoredToken] = []
        self._last: tuple[int, float, list[tuple[int, float]]] | None = None
        """A special token, until it is known whether another one follows."""

    def add(self, token: int, value: float, best: list[tuple[int, float]]) -> None:
        """Adds a token with its log-probability, and the best tokens in its place with theirs."""
        self._add_last()
        if token not in self._special:
            self._add(token, value, best)
        elif self._has_parts:
            self._last = token, value, best

    def add_all(self, output: SpeculativeGenerationOutput, first: int = 0) -> None:
        """Adds the tokens of a result, from the `first` on."""
        best = output.top_logprobs or [[]] * len(output.logprobs)
        for found in zip(output.generated_tokens[first:], output.logprobs[first:], best[first:], strict=False):
            self.add(*found)

    def _add_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._add(*last)

    def _add(self, token: int, value: float, best: list[tuple[int, float]]) -> None:
        text_of = self._bytes.of_first if self._is_first else self._bytes.of
        self._is_first = False
        text = text_of(token)
        others = [(text_of(other), of_other) for other, of_other in best]
        self._waiting.append(ScoredToken(text, value, others, self._length))
        self._note(self._decoder.decode(text))

    def _note(self, text: str) -> None:
        self._length += len(text)
        self._known += len(self._search.feed(text))

    def end(self, is_cut: bool) -> None:
        """Ends the answer; `is_cut` says whether it is as long as it may be, so that no end token ends it."""
        if is_cut:
            self._add_last()
        self._note(self._decoder.decode(b"", final=True))
        if not self._search.has_ended:
            self._known = self._length + 1

    def take(self) -> list[ScoredToken]:
        """The tokens that are newly known to begin within the text."""
        number = sum(1 for one in self._waiting if one.start < self._known)
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        return taken


def best_asked(gen_config: GenerationConfig) -> int | None:
    """Number of best tokens that a request with these options asks for; None for no log-probabilities."""
    return getattr(gen_config, "top_logprobs", None)


def answer_logprobs(
    tokenizer: PreTrainedTokenizerBase, gen_config: GenerationConfig, has_parts: bool
) -> AnswerLogprobs:
    """For an answer to a request with these options; see `AnswerLogprobs`."""
    special = frozenset(tokenizer.all_special_ids) | beside(gen_config).left_out
    return AnswerLogprobs(token_bytes_of(tokenizer), gen_config.stop_strings, special, has_parts)


def of_chat(tokens: list[ScoredToken]) -> list[dict[str, Any]]:
    """The tokens as chats and responses have them."""
    return [
        _entry(one.text, one.value) | {"top_logprobs": [_entry(text, value) for text, value in one.best]}
        for one in tokens
    ]


def _entry(text: bytes, value: float) -> dict[str, Any]:
    return {"token": text.decode(errors="replace"), "logprob": _finite(value), "bytes": list(text)}


def of_completion(tokens: list[ScoredToken]) -> dict[str, Any]:
    """The tokens as completions have them: the best ones in a place include the text's own."""
    return {
        "tokens": [_name(one.text) for one in tokens],
        "token_logprobs": [_finite(one.value) for one in tokens],
        "top_logprobs": [_by_name(one) for one in tokens],
        "text_offset": [one.start for one in tokens],
    }


def _by_name(token: ScoredToken) -> dict[str, float]:
    """The best tokens in a token's place and the token itself, the best first; of those with one name the best."""
    found = {_name(text): _finite(value) for text, value in reversed(token.best)}
    found[_name(token.text)] = _finite(token.value)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _name(text: bytes) -> str:
    """A token's text, or its bytes if they are no whole characters."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else UNLIKELY
