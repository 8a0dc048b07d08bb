"""Cutting the stop string from the end of texts, as OpenAI's API does."""

from __future__ import annotations

import asyncio
from typing import Any

from .streams import MergedQueue


def trimmed(text: str, stop_strings: str | list[str] | None) -> str:
    """The text up to the first stop string in it; all of it without one."""
    ends = [text.find(stop) for stop in _as_list(stop_strings)]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


class TrimmedQueue:
    """
    A queue of text pieces that leaves out the stop string and all text behind it. Text that may be the beginning of a
    stop string is held back until the next piece decides.

    Args:
        pieces (`MergedQueue` or `asyncio.Queue`): the source of pieces: text (`str`, or a subclass of it for text of
            another kind, such as reasoning; no stop string spans two kinds), and other objects, such as the final
            `None`, which pass unchanged.
        stop_strings (`str` or `list[str]`): strings that end the text.
    """

    def __init__(self, pieces: MergedQueue | asyncio.Queue, stop_strings: str | list[str]):
        self._pieces, self._stop_strings = pieces, _as_list(stop_strings)
        self._held, self._kind, self._has_ended = "", str, False
        self._ready: list[Any] = []

    async def get(self) -> Any:
        """Waits for the next piece and returns it."""
        while not self._ready:
            self._take(await self._pieces.get())
        return self._ready.pop(0)

    def get_nowait(self) -> Any:
        """Returns the next piece without waiting; raises `asyncio.QueueEmpty` if there is none."""
        while not self._ready:
            self._take(self._pieces.get_nowait())
        return self._ready.pop(0)

    def _take(self, piece: Any) -> None:
        if type(piece) is not self._kind:
            if self._held and not self._has_ended:
                self._ready.append(self._kind(self._held))
            self._held = ""
        if not isinstance(piece, str):
            self._ready.append(piece)
            return
        self._kind = type(piece)
        if self._has_ended:
            return
        self._held += piece
        text = trimmed(self._held, self._stop_strings)
        self._has_ended = len(text) < len(self._held)
        if not self._has_ended:
            text = text[: len(text) - self._open(text)]
        self._held = self._held[len(text) :]
        if text:
            self._ready.append(self._kind(text))

    def _open(self, text: str) -> int:
        """Most characters at the end of the text that may be the beginning of a stop string."""
        lengths = [n for stop in self._stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(lengths, default=0)


def _as_list(stop_strings: str | list[str] | None) -> list[str]:
    return [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
