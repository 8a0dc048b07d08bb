"""Where one text stands in its grammar."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np


class GrammarText:
    """
    A text that a grammar is told token by token. It may be told of a text that is not a continuation of the last one,
    and then goes back.

    Args:
        matcher (`LLMatcher`): the grammar's matcher, which has had no token.
        end_tokens (`frozenset[int]`): tokens that end a text, among them the one that the matcher knows; what comes
            after one is padding.
        special (`Collection[int]`): special tokens, which the matcher may ask for where the text of one must follow,
            although it does not take them then.
        unforced (`Callable`, *optional*): returns a new matcher of the same grammar in which nothing is forced, for a
            text in which the matcher asks for such a token; None: there is none.
    """

    def __init__(
        self,
        matcher: Any,
        end_tokens: frozenset[int],
        special: Collection[int] = (),
        unforced: Callable[[], Any] | None = None,
    ):
        self._matcher, self._end_tokens = matcher, end_tokens
        self._special, self._special_ids = frozenset(special), np.array(sorted(special), dtype=np.int64)
        self._unforced = unforced
        self._tokens: list[int] = []
        self.has_ended = False
        """Whether there is an end token among the tokens."""

    def follow(self, tokens: Sequence[int]) -> None:
        """
        Goes to the end of a text.

        Raises:
            ValueError: if the text is not one of the grammar's, or the grammar is too complex.
        """
        shared = num_shared(self._tokens, tokens)
        if shared < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - shared)
            del self._tokens[shared:]
        self.has_ended = any(token in self._end_tokens for token in tokens[shared:])
        new = list(itertools.takewhile(lambda token: token not in self._end_tokens, tokens[shared:]))
        taken = self._matcher.try_consume_tokens(new)
        self._tokens += new[:taken]
        if taken < len(new):
            self._check()
            raise ValueError(
                f"`grammar` does not let token {new[taken]} through, which stands in the text: another processor has "
                "chosen it, or ruled out all that it lets through (as `min_new_tokens` does where it ends), or the "
                "vocabulary lacks a character."
            )

    def allowed(self) -> np.ndarray:
        """
        The tokens that may come next, one bit each, the lowest of a byte first, `[vocab / 8]` uint8.

        Raises:
            ValueError: if there is none.
        """
        if self.has_ended:
            return self._ends()
        self._check()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        if self._unforced is not None and not all(self._takes([token]) for token in self._special_in(bits)):
            self._force_nothing()
            return self.allowed()
        if len(self._end_tokens) < 2:
            return bits
        bits, ends, is_complete = bits.copy(), self._ends(), self._matcher.is_accepting()
        of_ends = bits[: len(ends)]
        np.copyto(of_ends, of_ends | ends if is_complete else of_ends & ~ends)
        return bits

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """
        How many of these tokens are `allowed`, one after the other. Goes behind them. A tenth of the work of masks:
        what the grammar forces is the only token allowed, and without that every token that its parser takes.
        """
        for count, token in enumerate(tokens):
            if token in self._end_tokens:
                if not self.has_ended and not self._matcher.is_accepting():
                    return count
                self.has_ended = True
            elif (
                self.has_ended or self.forced(1) not in ([], [token]) or not self._matcher.try_consume_tokens([token])
            ):
                return count
            else:
                self._tokens.append(token)
        return len(tokens)

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that the grammar asks for next; fewer, or none, where there is a choice."""
        if self.has_ended or self._matcher.is_error():
            return []
        found = self._matcher.compute_ff_tokens()
        if self._unforced is not None and not self._special.isdisjoint(found) and not self._takes(found):
            self._force_nothing()
            return self.forced(most)
        return found[:most]

    def _special_in(self, bits: np.ndarray) -> list[int]:
        """The special tokens among those that are allowed."""
        ids = self._special_ids
        return ids[(bits[ids >> 3] >> (ids & 7)) & 1 == 1].tolist()

    def _takes(self, tokens: list[int]) -> bool:
        """Whether the matcher takes tokens, one after the other."""
        if tokens[0] in self._end_tokens:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens(tokens) == len(tokens)

    def _force_nothing(self) -> None:
        """
        Goes on with a matcher that forces nothing, since this one asks for tokens that it does not take: the text that
        looks like a special token is written in others.
        """
        assert self._unforced is not None
        self._matcher, self._unforced = self._unforced(), None
        self._matcher.try_consume_tokens(self._tokens)

    def _ends(self) -> np.ndarray:
        """The end tokens alone, as `allowed` returns them."""
        bits = np.zeros(max(self._end_tokens) + 1, dtype=np.uint8)
        bits[list(self._end_tokens)] = 1
        return np.packbits(bits, bitorder="little")

    def _check(self) -> None:
        """Raises a `ValueError` if the grammar can go no further."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            if reason.startswith("NoExtension"):
                reason = "no token of the vocabulary continues the text"
            raise ValueError(f"`grammar`: {reason}.")


def num_shared(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Number of tokens with which both lists begin. Fast where they differ near the end, if at all."""
    most = min(len(known), len(tokens))
    last = min(32, most)
    while known[: most - last] != tokens[: most - last]:
        last = min(2 * last, most)
    return next((place for place in range(most - last, most) if known[place] != tokens[place]), most)
