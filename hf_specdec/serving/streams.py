"""The pieces of a stream, of which waiting ones are merged into one, and its chunks, which are made from templates."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers.cli.serving.utils import _StreamError

from .calls import CallPiece
from .errors import RequestFailed


class MergedQueue:
    """
    A queue of text pieces that merges waiting pieces of one kind. A step may bring several tokens, and on a busy
    server several steps may pass before the stream is read.

    Args:
        pieces (`asyncio.Queue`): the source of pieces: text (`str`, or a subclass of it for text of another kind), and
            other objects, which pass unchanged.
    """

    def __init__(self, pieces: asyncio.Queue):
        self._pieces = pieces
        self._next: list[Any] = []

    async def get(self) -> Any:
        """Waits for the next piece and returns it."""
        return self._merged(self._next.pop() if self._next else await self._pieces.get())

    def get_nowait(self) -> Any:
        """Returns the next piece without waiting; raises `asyncio.QueueEmpty` if there is none."""
        return self._merged(self._next.pop() if self._next else self._pieces.get_nowait())

    def _merged(self, first: Any) -> Any:
        if isinstance(first, CallPiece):
            return self._call_merged(first)
        if not isinstance(first, str):
            return first
        parts, kind = [first], type(first)
        while not self._pieces.empty():
            piece = self._pieces.get_nowait()
            if type(piece) is not kind:
                self._next.append(piece)
                break
            parts.append(piece)
        return first if len(parts) == 1 else kind("".join(parts))

    def _call_merged(self, first: CallPiece) -> CallPiece:
        """A piece of a call with further ones of it that wait; its name is told alone."""
        parts = [first.arguments]
        while first.name is None and not self._pieces.empty():
            piece = self._pieces.get_nowait()
            if not isinstance(piece, CallPiece) or piece.index != first.index:
                self._next.append(piece)
                break
            parts.append(piece.arguments)
        return replace(first, arguments="".join(parts))


class RaisingQueue:
    """
    A queue of pieces that raises the error which ends them. (transformers' handlers would write an event of another
    form than OpenAI's clients read.)

    Args:
        pieces (`MergedQueue` or `TrimmedQueue`): the source of pieces, which a `_StreamError` or None ends.
        failure (`Callable`): the error of the request, if it has ended with one.
    """

    def __init__(self, pieces: Any, failure: Callable[[], Exception | None]):
        self._pieces, self._failure = pieces, failure
        self._error: _StreamError | None = None

    async def get(self) -> Any:
        """Waits for the next piece and returns it; raises the error that ends the stream."""
        piece = self._error or await self._pieces.get()
        if isinstance(piece, _StreamError):
            raise self._failure() or RequestFailed(piece.msg, is_its_own=False)
        return piece

    def get_nowait(self) -> Any:
        """Returns the next piece without waiting; raises `asyncio.QueueEmpty` if there is none before an error."""
        if self._error is None:
            piece = self._pieces.get_nowait()
            if not isinstance(piece, _StreamError):
                return piece
            self._error = piece  # the next `get` raises, when those who read have used the pieces before
        raise asyncio.QueueEmpty


_ID, _TEXT = "the id of nobody", "the text of nobody"


class QuickChunks:
    """
    A mixin for handlers of transformers' server that makes text-only chunks from a template, a chunk which the handler
    built in the same second. (With 64 streams, building chunks took more than half of the event loop's time.)
    """

    _TEXTS = ("text", "content", "reasoning_content")

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._second = 0
        self._built: dict[Any, tuple[str, ...]] = {}

    def _build_chunk_sse(self, request_id: str = "", *args: Any, **options: Any) -> str:
        names = [name for name in options if name != "model"]
        build: Any = super()._build_chunk_sse  # type: ignore[misc]  # of the handler with this mixin
        if len(names) != 1 or names[0] not in self._TEXTS or not isinstance(options[names[0]], str):
            return build(request_id, *args, **options)
        now, key = int(time.time()), (names[0], args, options.get("model"))
        if self._second != now:
            self._second, self._built = now, {}
        if key not in self._built:
            example = build(_ID, *args, **options | {names[0]: _TEXT})
            before, _, rest = example.partition(json.dumps(_ID))
            self._built[key] = (before, *rest.split(json.dumps(_TEXT)))
        if len(self._built[key]) != 3:  # a chunk of another form than expected
            return build(request_id, *args, **options)
        before, between, after = self._built[key]
        own = [json.dumps(str(value), ensure_ascii=False) for value in (request_id, options[names[0]])]
        return f"{before}{own[0]}{between}{own[1]}{after}"
