"""What a stream is made of: pieces that wait come as one, and chunks are those of transformers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import ReasoningText, _StreamError

from hf_specdec.serving.errors import RequestFailed
from hf_specdec.serving.handlers import Chats, Completions
from hf_specdec.serving.null_fields import add_null_fields
from hf_specdec.serving.stop_strings import TrimmedQueue
from hf_specdec.serving.streams import MergedQueue, RaisingQueue


TEXTS = ["a", "", ' "quoted" \\ and\nbroken\t', "größer 語 🙂 \u2028 \x00", "the text of nobody", "the id of nobody"]


def test_pieces_that_wait_come_as_one() -> None:
    """Text of one kind; never more than was there, and in order."""

    async def run() -> list[Any]:
        texts: asyncio.Queue = asyncio.Queue()
        queue, out = MergedQueue(texts), []
        waits = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        for piece in ("a", "b", ReasoningText("c"), ReasoningText("d"), "e", 1, "f", "g", None):
            texts.put_nowait(piece)
        out.append(await waits)
        while out[-1] is not None:
            out.append(queue.get_nowait() if len(out) % 2 else await queue.get())
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()
        return out

    found = asyncio.run(run())
    assert found == ["ab", "cd", "e", 1, "fg", None]
    assert [type(piece) for piece in found[:3]] == [str, ReasoningText, str]


def test_stop_strings_in_merged_pieces() -> None:
    async def run() -> list[Any]:
        texts: asyncio.Queue = asyncio.Queue()
        for piece in ("on", "e t", "wo", " three", None):
            texts.put_nowait(piece)
        queue = TrimmedQueue(MergedQueue(texts), "two")
        return [queue.get_nowait(), queue.get_nowait()]

    assert asyncio.run(run()) == ["one ", None]


def test_an_error_is_raised_after_the_pieces_before_it() -> None:
    """The error of the request, if it has one; `get_nowait` never raises it, so that no piece is lost."""

    async def run(failure: Exception | None) -> tuple[list[Any], Exception]:
        pieces: asyncio.Queue = asyncio.Queue()
        for piece in ("a", "b", _StreamError("why")):
            pieces.put_nowait(piece)
        queue = RaisingQueue(pieces, lambda: failure)
        found = [await queue.get(), queue.get_nowait()]
        for _ in range(2):
            with pytest.raises(asyncio.QueueEmpty):
                queue.get_nowait()
        with pytest.raises(RequestFailed) as error:
            await queue.get()
        return found, error.value

    own = RequestFailed("its own", True)
    assert asyncio.run(run(own)) == (["a", "b"], own)
    found, error = asyncio.run(run(None))
    assert found == ["a", "b"] and str(error) == "why"


@pytest.mark.parametrize(
    "ours, theirs, name",
    [
        (Completions, CompletionHandler, "text"),
        (Chats, ChatCompletionHandler, "content"),
        (Chats, ChatCompletionHandler, "reasoning_content"),
    ],
)
def test_chunks_are_those_of_transformers(ours: Any, theirs: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With null fields beside them; built once a second."""
    built, build = [], theirs._build_chunk_sse

    def counted(self: Any, *args: Any, **options: Any) -> str:
        built.append(options)
        return build(self, *args, **options)

    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(theirs, "_build_chunk_sse", counted)
    one, other = (kind.__new__(kind) for kind in (ours, theirs))
    one._second, one._built = 0, {}
    model = ("a model",) if name == "text" else ()
    options = {} if name == "text" else {"model": "a model"}
    for second in (1000.0, 1000.9, 1001.0):
        now[0] = second
        for request_id in ("one", 'an "id"'):
            for text in TEXTS:
                built.clear()
                ours_says = one._build_chunk_sse(request_id, *model, **options | {name: text})
                times = len(built)
                assert told_in(ours_says) == with_nulls(build(other, request_id, *model, **options | {name: text}))
                assert times == (second != 1000.9 and request_id == "one" and text == TEXTS[0])
    for others in ({"finish_reason": "stop"}, {name: "x", "finish_reason": "stop"}, {}):
        ours_says = one._build_chunk_sse("one", *model, **options | others)
        assert told_in(ours_says) == with_nulls(build(other, "one", *model, **options | others))


def told_in(event: str) -> Any:
    assert event.startswith("data: ") and event.endswith("\n\n") and event.count("\n") == 2
    return json.loads(event[6:])


def with_nulls(event: str) -> Any:
    found = told_in(event)
    add_null_fields(found)
    return found
