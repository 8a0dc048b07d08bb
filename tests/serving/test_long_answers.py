"""Long answers: no work that grows with their length keeps the event loop, and so the other requests, waiting."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.responses import JSONResponse  # noqa: E402
from support.scripts import BEGINS, END, Script, config_of, raw_answer, tokenizer  # noqa: E402
from transformers import GenerationConfig  # noqa: E402
from transformers.cli.serving.utils import get_response_template  # noqa: E402
from transformers.utils.chat_parsing import ResponseParser  # noqa: E402

from hf_specdec.serving import answers, text_pieces, total_parser  # noqa: E402
from hf_specdec.serving.answer_streams import ParsedAnswers  # noqa: E402
from hf_specdec.serving.answers import AnswerPieces  # noqa: E402
from hf_specdec.serving.app import build_app  # noqa: E402
from hf_specdec.serving.handlers import Chats  # noqa: E402
from hf_specdec.serving.tokenising import PromptMaker  # noqa: E402
from hf_specdec.serving.total_parser import TotalParser  # noqa: E402
from hf_specdec.serving.work_pool import at_once  # noqa: E402


LENGTH = 60_000
LONGEST_GAP = 0.6
"""Seconds for which the event loop may come to nothing else, with other processes on the machine."""
SLOW = 0.8
MEASURED = threading.Event()
"""Set while it is measured: what lasts longer does so then alone."""
CHAT = "/v1/chat/completions"
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
}
CALL = '<tool_call>{"name": "f", "arguments": {"x": "%s"}}</tool_call>'
TEXTS = {
    "content": "a word, " * (LENGTH // 8) + END,
    "reasoning": f"<think>{'a thought, ' * (LENGTH // 11)}</think>Hello.{END}",
    "call": CALL % ("x y " * (LENGTH // 4)) + END,
    "calls": CALL % "x" * (LENGTH // 60) + END,
    "spaces": "a" + " " * LENGTH + f"b{END}",
}


def asked(script: Script, path: str, **options: Any) -> tuple[float, int, bytes]:
    """The longest time in which the event loop came to nothing else, the status and the body of the answer."""
    app = build_app(script, tokenizer(), "some/model")  # type: ignore[arg-type]
    content = json.dumps(PATHS[path] | options).encode()

    async def run() -> tuple[float, int, bytes]:
        await raw_answer(app, path, json.dumps(PATHS[path]).encode())  # what the first request needs
        MEASURED.set()
        gaps, last = [0.0], time.monotonic()
        doing = asyncio.ensure_future(raw_answer(app, path, content))
        while not doing.done():
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last += gaps[-1]
        return max(gaps), *doing.result()

    gc.collect()
    gc.disable()  # as the server keeps it from what has been loaded; see `never_search_again`
    try:
        return asyncio.run(run())
    finally:
        MEASURED.clear()
        gc.enable()


@pytest.mark.parametrize(
    "kind, path", [*zip(TEXTS, (CHAT, "/v1/responses", "/v1/completions", CHAT, CHAT), strict=True)]
)
def test_long_answers(kind: str, path: str) -> None:
    gap, status, _ = asked(Script(TEXTS[kind], is_cut=True), path)
    assert status == 200 and gap < LONGEST_GAP


def slow(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str) -> list[float]:
    """Makes something last longer for long texts; returns the list of these times."""
    function, times = getattr(kind, name), []

    def slowed(self: Any, *arguments: Any, **options: Any) -> Any:
        is_long = name in ("end", "_tokens") or any(len(str(one)) > 10_000 for one in arguments)
        if MEASURED.is_set() and is_long:
            times.append(SLOW)
            time.sleep(SLOW)
        return function(self, *arguments, **options)

    monkeypatch.setattr(kind, name, slowed)
    return times


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind, name", [(type(tokenizer()), "decode"), (JSONResponse, "render"), (AnswerPieces, "end")]
)
def test_what_is_done_beside_the_loop(kind: Any, name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding, parsing and writing the JSON of a long answer."""
    times = slow(monkeypatch, kind, name)
    gap, status, _ = asked(Script("a word " * 2000 + END), path)
    assert status == 200 and gap < LONGEST_GAP
    assert times or (path, name) == ("/v1/completions", "end")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "kind, name",
    [(type(tokenizer()), "decode"), (PromptMaker, "_tokens"), (Chats, "_build_generation_config")],
)
def test_long_prompts(kind: Any, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made of messages, tokenised, and read for what they begin of the answer."""
    times = slow(monkeypatch, kind, name)
    messages = [{"role": "user", "content": "a word " * 3000}]
    gap, status, _ = asked(Script(f"Hello.{END}"), CHAT, messages=messages, stream=stream)
    assert status == 200 and times and gap < LONGEST_GAP


def test_streams_that_are_told_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As are those of tokenizers with decoders of their own."""
    monkeypatch.setattr(text_pieces, "_is_local", lambda _: False)
    times = slow(monkeypatch, AnswerPieces, "end")
    gap, status, events = asked(Script("a word " * 2000 + END, step=500), CHAT, stream=True)
    assert status == 200 and times and gap < LONGEST_GAP
    assert events.count(b"a word") == 2000 and events.endswith(b"data: [DONE]\n\n")


# --------------------------------------------------------------------------------------------------------- the parser


def template() -> Any:
    return get_response_template(tokenizer(), SimpleNamespace(config=config_of("qwen3")))


def parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = ParsedAnswers(tokenizer(), GenerationConfig()).parse_response(
        tokenizer()(text)["input_ids"], template(), prefix=BEGINS["qwen3"]
    )
    return found


@pytest.mark.parametrize("kind", TEXTS)
def test_a_stream_costs_the_same_at_its_end(kind: str) -> None:
    """Of what has been told nothing is kept that each further token would copy."""
    parser = TotalParser.over(ResponseParser(template(), prefix=BEGINS["qwen3"]))
    text = TEXTS[kind][:30_000]
    for at in range(0, len(text), 5):
        parser.feed(text[at : at + 5])
        assert len(parser._buffer) < total_parser.MOST_READ + total_parser.LEAST_READ + total_parser.MOST_HELD + 10
        assert len(parser._body) < 10


@pytest.mark.parametrize("fed", [1, 7, 10**6])
def test_what_is_dropped_changes_nothing(fed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALL % "y"
    texts = [
        f"<think>a{' ' * 40}b</think> c{' ' * 50}{call}  {call}d{call[:-9]}{END}",
        f"{call[:20]}{END}",
        f" a {END}",
    ]
    texts += [f"<think>{call}</think>\n{call[:30]}<tool_call>", f"a{' ' * 30}{call} {' ' * 30}{END}", call * 3]
    expected = [parsed(text) for text in texts]
    for name, value in {"MOST_READ": 3, "LEAST_READ": 2, "MOST_HELD": 24, "MOST_FED": fed}.items():
        monkeypatch.setattr(answers if name == "MOST_FED" else total_parser, name, value)
    assert [parsed(text) for text in texts] == expected


def test_coroutines_that_wait_are_none_for_a_thread() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    async def returns() -> int:
        return 5

    assert at_once(returns()) == 5
    with pytest.raises(RuntimeError, match="waits"):
        at_once(waits())
