"""Texts as the draft model reads them, encoded anew as they grow."""

from __future__ import annotations

import re

from ...cache.blocks import BlockTable
from .translation import Translation


LEAST_PIECE, MOST_PIECE = 512, 4096
"""Bytes of a piece of text: it ends before the first word after the least, or else with the character at the most."""
_BEFORE_WORD = re.compile(rb"(?<=\S) (?=\S)")
_LAST_TOKENS = 32
"""Tokens of the target at the end of a text that are kept, to see how new text begins."""


class DraftText:
    """
    A text of the target in the draft's tokens. It is encoded piece by piece; where pieces end depends on the text
    before alone, and so do the tokens, whatever the steps were in which it has grown.

    Args:
        translation (`Translation`): between the target's tokens and the draft's.
    """

    def __init__(self, translation: Translation):
        self._translation = translation
        self._closed, self._open = list(translation.draft.opening), b""
        self._goes_on = False
        """Whether the open piece follows another one without a special token between."""
        self.tokens: list[int] = []
        """The text as the draft reads it; at least one token."""
        self.num_read = 0
        """Tokens of the target that have been read."""
        self.last: list[int] = []
        """The last of these."""
        self.room = 0
        """Levels of draft tokens that a step can use."""
        self.table = BlockTable()
        """Blocks of the draft's keys and values, for requests in flight."""
        self.read([])

    @property
    def length(self) -> int:
        """Number of the draft's tokens."""
        return len(self.tokens)

    def read(self, tokens: list[int]) -> int:
        """
        Appends tokens of the target; ids that are no tokens are left out. Returns how many of the draft's tokens stay
        as they were.
        """
        self.num_read += len(tokens)
        self.last = (self.last + tokens)[-_LAST_TOKENS:]
        before, translation = self.tokens, self._translation
        run: list[bytes] = []
        for token in tokens:
            special = translation.special.get(token)
            if special is None:
                run.append(translation.bytes_of(token))
            else:
                self._append(b"".join(run))
                self._end_run(special)
                run = []
        self._append(b"".join(run))
        closed = self._closed + self._encoded(self._open)
        self.tokens = closed or [next(iter(translation.draft.roles.values()), 0)]
        return _num_equal(before, self.tokens)

    def _end_run(self, special: int) -> None:
        """Closes the open piece, and appends a special token of the draft; that which opens all texts comes once."""
        self._closed += self._encoded(self._open)
        self._open, self._goes_on = b"", False
        if self._closed != self._translation.draft.opening or self._closed[-1:] != [special]:
            self._closed.append(special)

    def _append(self, data: bytes) -> None:
        """Appends bytes, and closes the pieces that end there."""
        self._open, start = self._open + data, 0
        while (end := _end_of_piece(self._open, start)) is not None:
            self._closed += self._encoded(self._open[start:end])
            start, self._goes_on = end, True
        self._open = self._open[start:]

    def _encoded(self, piece: bytes) -> list[int]:
        is_first = len(self._closed) == len(self._translation.draft.opening)
        return self._translation.encoded(piece, is_first, self._goes_on)


def _end_of_piece(data: bytes, start: int) -> int | None:
    """Where the piece from `start` on ends; None if that is not known yet."""
    if len(data) - start <= LEAST_PIECE:
        return None
    found = _BEFORE_WORD.search(data, start + LEAST_PIECE, start + MOST_PIECE + 1)
    if found is not None:
        return found.start()
    starts = (place for place in range(start + MOST_PIECE, len(data)) if data[place] & 0xC0 != 0x80)
    return next(starts, None)


def _num_equal(first: list[int], second: list[int]) -> int:
    """Number of tokens with which both texts begin."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(place for place in range(shorter) if first[place] != second[place])
