"""Large and slow requests: refused early, or served beside the others."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers import client_over
from support.tokenizer import tiny_tokenizer
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from hf_specdec.smollm2 import smollm2_folder


for package in ("fastapi", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402

from hf_specdec.serving import body_limits, work_pool  # noqa: E402
from hf_specdec.serving.app import build_app  # noqa: E402
from hf_specdec.serving.body_limits import BodyLimit  # noqa: E402
from hf_specdec.serving.defaults import MOST_BODY_BYTES  # noqa: E402
from hf_specdec.serving.engine.messages import Served  # noqa: E402
from hf_specdec.serving.errors import RequestRefused  # noqa: E402
from hf_specdec.serving.requests import counting  # noqa: E402
from hf_specdec.serving.requests.counting import check_size  # noqa: E402
from hf_specdec.serving.text_limits import TextLimit, longest_entry  # noqa: E402
from hf_specdec.serving.work_pool import WorkPool, body_size  # noqa: E402


MOST_BYTES = 100_000
NUM_TOKENS = 4 * 200


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    template = "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
    with client_over(chat_template=template, max_body_bytes=MOST_BYTES) as (client, _):
        yield client


# -------------------------------------------------------------------------------------------------------------- bodies


def test_bodies_that_are_too_long(client: TestClient) -> None:
    """Whether they say their length or not; those at the limit are read."""
    rest = len(json.dumps({"prompt": ""}))
    for length, status in ((MOST_BYTES, 400), (MOST_BYTES + 1, 413)):
        content = json.dumps({"prompt": "a" * (length - rest)}).encode()
        assert len(content) == length
        for given in (content, iter([content[:1000], content[1000:]])):
            answer = client.post("/v1/completions", content=given, headers={"Content-Type": "application/json"})
            assert answer.status_code == status, answer.text
            assert ("--max-body-bytes" in answer.json()["error"]["message"]) == (status == 413)


def test_a_body_is_not_read_on() -> None:
    """By its announced length before anything has come, and else as soon as too much has."""

    async def run(headers: list[tuple[bytes, bytes]]) -> tuple[int, int]:
        received, sent = [], []

        async def receive() -> dict[str, Any]:
            received.append(1)
            return {"type": "http.request", "body": b"x" * 400, "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def app(*_: Any) -> None:
            raise AssertionError("the application gets it")

        await BodyLimit(app, 1000)({"type": "http", "method": "POST", "headers": headers}, receive, send)
        return sent[0]["status"], len(received)

    assert asyncio.run(run([(b"content-length", b"1001")])) == (413, 0)
    assert asyncio.run(run([(b"content-length", b"9" * 400)])) == (413, 0)
    assert asyncio.run(run([(b"content-length", b"1000")])) == (413, 3)
    assert asyncio.run(run([])) == (413, 3)


@pytest.mark.parametrize("size", [1000, body_limits.ALWAYS_READ + 1])
def test_many_bodies_at_once(size: int) -> None:
    """
    Only so many large ones are held, be they read or waiting for their answers: others are answered with 503 until one
    is over, is answered, or its client leaves. Small ones are always read.
    """
    most, count = 2 * body_limits.ALWAYS_READ, 100
    held = asyncio.Semaphore(0)
    goes_on, begins = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert len((await receive())["body"]) == size
        held.release()
        await begins.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await goes_on.wait()

    limit = BodyLimit(app, most)

    async def ask(*messages: dict[str, Any], end: asyncio.Event | None = None) -> Any:
        left, sent = [*messages], []

        async def receive() -> dict[str, Any]:
            if not left and end is not None:
                await end.wait()
                return {"type": "http.disconnect"}
            return left.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await limit({"type": "http", "headers": []}, receive, send)
        return sent[0] if sent else None

    async def run() -> None:
        whole = {"type": "http.request", "body": b"x" * size, "more_body": False}
        part, leave = whole | {"more_body": True}, asyncio.Event()
        reading = [asyncio.ensure_future(ask(part, end=leave)) for _ in range(10)]
        await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(ask(whole)) for _ in range(count)]
        await asyncio.sleep(0.1)
        refused = [one.result() for one in waiting if one.done()]
        if size < body_limits.ALWAYS_READ:
            assert not refused and limit._held == (count + 10) * size
        else:
            assert len(refused) == count + 10 - body_limits.MOST_BODIES * most // size
            assert all(one["status"] == 503 and b"retry-after" in dict(one["headers"]) for one in refused)
            assert limit._held <= body_limits.MOST_BODIES * most
        leave.set()
        await asyncio.gather(*reading)
        assert limit._held == (count - len(refused)) * size
        begins.set()
        await asyncio.sleep(0.01)
        assert limit._held == 0
        goes_on.set()
        assert {one["status"] for one in await asyncio.gather(*waiting)} <= {200, 503}

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_number_of_values(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> None:
    """Of what is in strings none counts, whatever is escaped in them."""
    monkeypatch.setattr(counting, "MOST_VALUES", 20)
    for text in (",[{" * 50, '\\",' * 50, "\\\\" * 9, '\\\\\\"' + ",[" * 30, "\\" * 5 + '",' * 30):
        check_size(json.dumps({text: [text, 1, {}]}).encode())
    check_size(b'{"not ended \\",,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,')
    check_size(b'"\\')
    for value in ([[]] * 20, [0] * 21, {str(number): 0 for number in range(21)}, ["\\"] * 21, [{"a": '"'}] * 12):
        with pytest.raises(RequestRefused, match="more than 20 values"):
            check_size(json.dumps(value).encode())
    answer = client.post("/v1/completions", json={"prompt": "a", "stop": ["a"] * 30})
    assert answer.status_code == 400 and "more than 20 values" in answer.json()["error"]["message"]


# --------------------------------------------------------------------------------------------------------------- texts


def test_the_longest_legal_prompt() -> None:
    """It is made of the longest token, and tokenised; a prompt that is longer by more than a token is not."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    longest = longest_entry(tokenizer)
    entries = tokenizer.get_vocab().values()
    assert longest == max(len(tokenizer.decode([token]).encode()) for token in entries)
    token = next(token for token in entries if len(tokenizer.decode([token])) == longest)
    limit = TextLimit.of(tokenizer, 8192)
    text = tokenizer.decode([token]) * 8192
    assert tokenizer(text)["input_ids"] == [token] * 8192 and limit.most_bytes == 8193 * longest
    limit.check(text)
    limit.check(text + " " * longest)
    with pytest.raises(ValueError, match=f"has {8193 * longest + 1} bytes, but 8192 tokens are the most"):
        limit.check(text + " " * (longest + 1))


class FullEngine:
    """An engine for texts of 8192 tokens that has no place; notes the prompts that reach it."""

    fatal_error = None

    def __init__(self, vocab_size: int):
        self.model = Served(LlamaConfig(vocab_size=vocab_size), GenerationConfig(eos_token_id=2), 8192, 8192)
        self.background_thread_status, self.prompts = self, []

    def add_request(self, input_ids: list[int], *_: Any, **__: Any) -> None:
        self.prompts.append(input_ids)
        raise queue.Full("no place")

    def register_result_handler(self, *_: Any) -> None: ...
    def unregister_result_handler(self, *_: Any) -> None: ...
    def cancel_request(self, *_: Any) -> None: ...


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_longest_legal_prompt_over_http(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the engine. What is longer by more than a token is not tokenised, and above the limit not read."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    tokenizer.chat_template = "{{ messages[0].content }}"
    engine, longest = FullEngine(len(tokenizer)), longest_entry(tokenizer)
    token = next(token for token in tokenizer.get_vocab().values() if len(tokenizer.decode([token])) == longest)
    text = tokenizer.decode([token])
    client = TestClient(build_app(engine, tokenizer, "some/model"))  # type: ignore[arg-type]

    def status(text: str) -> set[int]:
        bodies = {"completions": {"prompt": text, "max_tokens": 1}, "responses": {"input": text}}
        bodies["chat/completions"] = {"messages": [{"role": "user", "content": text}]}
        return {
            client.post(f"/v1/{path}", json=body | {"stream": stream}).status_code for path, body in bodies.items()
        }

    assert status(text * 8191) == {503}
    assert engine.prompts == [[token] * 8191] * 3
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    assert status(text * 8193 + "a") == {400} and status("a" * MOST_BODY_BYTES) == {413}
    assert len(engine.prompts) == 3


def test_prompts_beyond_the_limit_are_not_tokenised(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the text of the prompt, from which the template may have left out much of the request."""
    tokenizer = tiny_tokenizer()
    most = TextLimit.of(tokenizer, NUM_TOKENS).most_bytes
    assert most is not None and most < MOST_BYTES - 1000
    chat = {"messages": [{"role": "user", "content": "a" + " " * (most + 1)}], "max_tokens": 2}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    chat["messages"][0]["content"] = "a" * (most + 1)
    for path, body in (
        ("chat/completions", chat),
        ("completions", {"prompt": "a" * (most + 1)}),
        ("responses", {"input": "a" * (most + 1)}),
    ):
        for stream in (False, True):
            answer = client.post(f"/v1/{path}", json=body | {"stream": stream})
            assert answer.status_code == 400 and f"has {most + 1} bytes" in answer.json()["error"]["message"]


def test_a_limit_for_some_tokenizers() -> None:
    """None where a token stands for any number of characters."""

    class Dropping:
        """Drops spaces, as tokenizers do whose pre-tokenizer splits at them."""

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "aaa": 1, " ": 2}

        def decode(self, tokens: list[int]) -> str:
            return "".join(("a", "aaa", " ")[token] for token in tokens)

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [0] * len(text.replace(" ", "").encode())}

    tokenizer: Any = Dropping()
    assert longest_entry(tokenizer) == 3 and TextLimit.of(tokenizer, 10).most_bytes is None
    TextLimit.of(tokenizer, 10).check("a" * 1000)


# ------------------------------------------------------------------------------------------------------------ the pool


def test_others_are_served_meanwhile(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """While large prompts are tokenised; a small one does not wait for them."""
    tokenizer, goes_on = tiny_tokenizer(), threading.Event()
    kind: Any = type(tokenizer)
    tokenise, waiting = kind.__call__, []

    def slow(self: Any, text: str, **options: Any) -> Any:
        if len(text) > work_pool.SMALL:
            waiting.append(1)
            goes_on.wait(30)
            text = "abc"
        return tokenise(self, text, **options)

    monkeypatch.setattr(kind, "__call__", slow)
    monkeypatch.setattr(TextLimit, "check", lambda *_: None)
    chat = {"messages": [{"role": "user", "content": "a" * 20_000}], "max_tokens": 2}
    bodies = [("completions", {"prompt": "a" * 20_000, "max_tokens": 2}), ("chat/completions", chat)]
    answers: list[int] = []
    asking = [
        threading.Thread(target=lambda at=at: answers.append(client.post(f"/v1/{at[0]}", json=at[1]).status_code))
        for at in [(path, body | {"stream": stream}) for path, body in bodies for stream in (False, True)]
    ]
    for one in asking:
        one.start()
    until = time.monotonic() + 20
    while len(waiting) < work_pool.MOST_THREADS:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200
    assert len(waiting) == work_pool.MOST_THREADS and not answers
    goes_on.set()
    for one in asking:
        one.join(30)
    assert answers == [200] * 4


def test_a_disconnect_cancels_what_waits() -> None:
    """What has not begun never does; small requests are no matter of threads."""

    async def run() -> list[str]:
        work, goes_on, done = WorkPool(), threading.Event(), []

        def job(name: str) -> None:
            goes_on.wait(10)
            done.append(name)

        body_size.set(work_pool.SMALL + 1)
        tasks = [asyncio.create_task(work.run(job, f"{number}")) for number in range(work_pool.MOST_THREADS + 2)]
        await asyncio.sleep(0.05)
        tasks[-1].cancel()
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        body_size.set(work_pool.SMALL)
        assert await work.run(threading.current_thread) is threading.main_thread()
        goes_on.set()
        await asyncio.wait(tasks)
        await asyncio.sleep(0.05)
        return sorted(done)

    assert asyncio.run(run()) == [f"{number}" for number in range(work_pool.MOST_THREADS + 1)]
