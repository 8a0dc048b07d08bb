"""Free text before that of a grammar, such as reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .texts import GrammarText, num_shared


@dataclass(frozen=True)
class FreeBeginning:
    """
    The beginning of a text in which all tokens are allowed; a grammar begins after it.

    Args:
        end (`tuple[int, ...]`): tokens that it ends with, the first time that they come.
        start (`int`, *optional*): the token that it starts with. If the text starts with another one, it has no free
            beginning. None: it has one in any case, which the prompt may have started.
    """

    end: tuple[int, ...]
    start: int | None = None

    @classmethod
    def of(cls, value: Any) -> FreeBeginning | None:
        """
        What `grammar_after` says: a `FreeBeginning`, the tokens that it ends with, or None.

        Raises:
            TypeError, ValueError: for anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        is_known = isinstance(value, Sequence) and all(isinstance(one, int) and one >= 0 for one in value)
        if not is_known or isinstance(value, (str, bytes)):
            raise TypeError(
                f"`grammar_after` must be a list of token ids, or a `FreeBeginning`, but is {value!r}. Give those "
                "that end the text before that of the grammar."
            )
        if not value:
            raise ValueError("`grammar_after` has no token. Give one or more, or leave it out.")
        return cls(tuple(value))

    def length_in(self, tokens: Sequence[int], searched: int = 0) -> int | None:
        """
        Number of a text's tokens before the grammar begins; None if it has not yet, as is known of the first
        `searched` tokens.
        """
        if self.start is not None and tokens and tokens[0] != self.start:
            return 0
        place = searched
        while self.end[-1] in tokens[place:]:
            place = tokens.index(self.end[-1], place) + 1
            if tuple(tokens[max(place - len(self.end), 0) : place]) == self.end:
                return place
        return None


class LateText:
    """
    A text with a free beginning; see `GrammarText` for what it is asked.

    Args:
        text (`GrammarText`): the text after that.
        beginning (`FreeBeginning`): says where it begins.
        vocab_size (`int`): number of tokens.
    """

    def __init__(self, text: GrammarText, beginning: FreeBeginning, vocab_size: int):
        self._text, self._beginning, self._vocab_size = text, beginning, vocab_size
        self._tokens: list[int] = []
        self._place: int | None = None
        """Number of tokens before the grammar begins; None as long as it does not."""

    @property
    def _may_start(self) -> bool:
        """Whether the next token decides if there is a free beginning."""
        return not self._tokens and self._beginning.start is not None

    @property
    def has_ended(self) -> bool:
        """Whether there is an end token after the free beginning."""
        return self._place is not None and self._text.has_ended

    def follow(self, tokens: Sequence[int]) -> None:
        """Goes to the end of a text. Raises a `ValueError` if the grammar does not let it through."""
        shared = num_shared(self._tokens, tokens)
        self._tokens[shared:] = tokens[shared:]
        if self._place is None or self._place > shared or shared == 0:
            self._place = self._beginning.length_in(tokens, shared)
        self._text.follow([] if self._place is None else tokens[self._place :])

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, as bits, `[vocab / 8]` uint8. Raises a `ValueError` if there is none."""
        if self._place is not None:
            return self._text.allowed()
        if not self._may_start or self._beginning.start is None:
            return np.full(-(-self._vocab_size // 8), 255, dtype=np.uint8)
        byte, bit = divmod(self._beginning.start, 8)
        bits = self._text.allowed()
        found = np.zeros(max(len(bits), byte + 1), dtype=np.uint8)
        found[: len(bits)] = bits
        found[byte] |= 1 << bit
        return found

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens are allowed, one after the other. Goes behind them."""
        for count, token in enumerate(tokens):
            is_free = self._place is None and (not self._may_start or token == self._beginning.start)
            if not is_free and not self._text.num_allowed([token]):
                return count
            self._tokens.append(token)
            if self._place is None:
                self._place = self._beginning.length_in(self._tokens, len(self._tokens) - 1)
        return len(tokens)

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that the grammar asks for next."""
        return [] if self._place is None else self._text.forced(most)
