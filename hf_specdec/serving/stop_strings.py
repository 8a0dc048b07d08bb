"""Stop strings as in OpenAI's API: searched in the generated text, and cut from its end."""

from __future__ import annotations

import asyncio
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..engine.stopping import TokenCriterion
from .characters import shortened
from .streams import MergedQueue
from .text_pieces import REPLACEMENT, TextPieces


MOST_STOP_STRINGS = 4
"""Most stop strings of a request, as in OpenAI's API."""
LONGEST_STOP_STRING = 1024
"""Most characters of a stop string."""
_STOP = "`stop` (`stop_strings` of a generation config)"


def checked_stop_strings(stop_strings: Any) -> list[str]:
    """
    The stop strings as a list, each of one character or more.

    Raises:
        TypeError, ValueError: for what is no string or list of strings, and for an empty string.
    """
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) for string in strings):
        raise TypeError(f"{_STOP} must be a string or a list of strings, but is {shortened(stop_strings)}.")
    if not all(strings):
        raise ValueError(f"{_STOP} has an empty string in it, with which every text begins. Leave it out.")
    return list(strings)


def check_number_and_length(stop_strings: list[str]) -> None:
    """
    Checks that stop strings are few, and short enough to be searched at every token.

    Raises:
        ValueError: if there are too many, or one is too long.
    """
    if len(stop_strings) > MOST_STOP_STRINGS:
        raise ValueError(f"{_STOP} may have {MOST_STOP_STRINGS} strings, but has {len(stop_strings)}. Give fewer.")
    longest = max(stop_strings, key=len, default="")
    if len(longest) > LONGEST_STOP_STRING:
        raise ValueError(
            f"{_STOP} may have strings of {LONGEST_STOP_STRING} characters, but {shortened(longest)} has "
            f"{len(longest)}. Give a shorter one, such as its beginning."
        )


def trimmed(text: str, stop_strings: str | list[str] | None) -> str:
    """The text up to the first stop string in it; all of it without one."""
    ends = [text.find(stop) for stop in as_list(stop_strings)]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


class StopStringSearch:
    """
    A search for the first stop string in a text that comes in pieces, each of which costs about its own length.

    Args:
        stop_strings (`list[str]`): what ends the text.
    """

    def __init__(self, stop_strings: list[str]):
        self._strings = stop_strings
        self.has_ended = False
        """Whether a stop string was found."""
        self.start()

    def start(self) -> None:
        """Begins another text."""
        self.held = ""
        """The end of the text, held back because it may be the beginning of a stop string."""
        self._begun = [0] * len(self._strings)

    def feed(self, piece: str) -> str:
        """Adds a piece; returns the text that is newly known to precede all stop strings."""
        if self.has_ended:
            return ""
        text, begun, end, most = self.held + piece, self._begun, -1, 0
        for number, string in enumerate(self._strings):
            start = len(self.held) - begun[number]  # a match begins in its own part of the held text, or later
            at = text.find(string, start)
            if at >= 0:
                end = at if end < 0 else min(end, at)
            begun[number] = length = _begun(string, text, start)
            if length > most:
                most = length
        self.has_ended, known = end >= 0, len(text) - most if end < 0 else end
        self.held = "" if self.has_ended else text[known:]
        return text[:known]

    def would_end(self, piece: str) -> bool:
        """Whether a stop string would end within a piece, which is not added."""
        return bool(piece) and any(string in self.held + piece for string in self._strings)


def _begun(string: str, text: str, start: int) -> int:
    """How many of a text's last characters, from `start` on at most, are the beginning of a string."""
    at = text.find(string[0], start)
    while at >= 0:
        if string.startswith(text[at:]):
            return len(text) - at
        at = text.find(string[0], at + 1)
    return 0


class StopStringCriterion(TokenCriterion):
    """
    A stopping criterion that decodes the generated text token by token and ends it with the first stop string. (The
    criterion of transformers searches the prompt, too, and first builds a table over the vocabulary, which takes
    seconds for a long string.)

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        stop_strings (`str` or `list[str]`): what ends the text.

    Raises:
        TypeError, ValueError: see `checked_stop_strings`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: str | list[str]):
        self._search, self._pieces = StopStringSearch(checked_stop_strings(stop_strings)), TextPieces(tokenizer)

    def ends_with(self, token: int) -> bool:
        """Whether a stop string ends within this token."""
        self._search.feed(self._pieces.add(token))
        rest = "" if self._search.has_ended else self._pieces.rest()
        return self._search.has_ended or self._search.would_end(rest.rstrip(REPLACEMENT))


class TrimmedPieces:
    """
    Leaves out the stop string of a text in pieces, and all text after it. Text that may be the beginning of a stop
    string is held back until the next piece decides.

    Args:
        stop_strings (`str` or `list[str]`, *optional*): strings that end the text.
    """

    def __init__(self, stop_strings: str | list[str] | None):
        self._search, self._kind = StopStringSearch(as_list(stop_strings)), str

    def take(self, piece: Any) -> list[Any]:
        """
        Adds a piece; returns what is newly known.

        Args:
            piece: text (`str`, or a subclass of it for text of another kind, such as reasoning; no stop string spans
                two kinds), or another object, such as the final `None`, which passes unchanged.
        """
        known: list[Any] = []
        if type(piece) is not self._kind:
            if self._search.held:
                known.append(self._kind(self._search.held))
            self._search.start()
        if not isinstance(piece, str):
            return [*known, piece]
        self._kind = type(piece)
        text = self._search.feed(piece)
        return [*known, self._kind(text)] if text else known


class TrimmedQueue:
    """
    A queue of text pieces without stop strings; see `TrimmedPieces`.

    Args:
        pieces (`MergedQueue` or `asyncio.Queue`): the source of pieces.
        stop_strings (`str` or `list[str]`): strings that end the text.
    """

    def __init__(self, pieces: MergedQueue | asyncio.Queue, stop_strings: str | list[str]):
        self._pieces, self._trimmed = pieces, TrimmedPieces(stop_strings)
        self._ready: list[Any] = []

    async def get(self) -> Any:
        """Waits for the next piece and returns it."""
        while not self._ready:
            self._ready += self._trimmed.take(await self._pieces.get())
        return self._ready.pop(0)

    def get_nowait(self) -> Any:
        """Returns the next piece without waiting; raises `asyncio.QueueEmpty` if there is none."""
        while not self._ready:
            self._ready += self._trimmed.take(self._pieces.get_nowait())
        return self._ready.pop(0)


def as_list(stop_strings: str | list[str] | None) -> list[str]:
    """Stop strings as a list, which is empty for None."""
    return [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
