"""Streams that cost little: what waits goes out in one piece, and a chunk is not built anew for every piece."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any


class MergedQueue:
    """
    A queue of pieces of a text, of which those that wait come as one. A step may bring several tokens, and a busy
    server several steps, before the stream is looked at.

    Args:
        pieces (`asyncio.Queue`): text (`str`, or a subclass of it for text of another kind), and other things that
            pass unchanged.
    """

    def __init__(self, pieces: asyncio.Queue):
        self._pieces = pieces
        self._next: list[Any] = []

    async def get(self) -> Any:
        """The next piece."""
        return self._merged(self._next.pop() if self._next else await self._pieces.get())

    def get_nowait(self) -> Any:
        """The next piece, if there is one: else `asyncio.QueueEmpty`."""
        return self._merged(self._next.pop() if self._next else self._pieces.get_nowait())

    def _merged(self, first: Any) -> Any:
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


_ID, _TEXT = "the id of nobody", "the text of nobody"


class QuickChunks:
    """
    Mixed into a handler of transformers' server: its chunks with nothing but text in them are made from one that the
    handler has built in the same second. (With 64 streams, to build them was more than half of the event loop's time.)
    """

    _TEXTS = ("text", "content", "reasoning_content")

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._second = 0
        self._built: dict[Any, tuple[str, ...]] = {}

    def _build_chunk_sse(self, request_id: str = "", *args: Any, **options: Any) -> str:
        names = [name for name in options if name != "model"]
        build: Any = super()._build_chunk_sse  # type: ignore[misc]  # it is mixed into one
        if len(names) != 1 or names[0] not in self._TEXTS or not isinstance(options[names[0]], str):
            return build(request_id, *args, **options)
        now, key = int(time.time()), (names[0], args, options.get("model"))
        if self._second != now:
            self._second, self._built = now, {}
        if key not in self._built:
            example = build(_ID, *args, **options | {names[0]: _TEXT})
            before, _, rest = example.partition(json.dumps(_ID))
            self._built[key] = (before, *rest.split(json.dumps(_TEXT)))
        if len(self._built[key]) != 3:  # it is not as it was when this was written
            return build(request_id, *args, **options)
        before, between, after = self._built[key]
        own = [json.dumps(str(value), ensure_ascii=False) for value in (request_id, options[names[0]])]
        return f"{before}{own[0]}{between}{own[1]}{after}"
