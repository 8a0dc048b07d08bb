"""Records are answered as the server answers requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from support.goldens import TINY_TARGET
from support.servers import client_over


pytest.importorskip("fastapi")
pytest.importorskip("openai")

from hf_specdec.bulk import Answering, answering  # noqa: E402
from hf_specdec.bulk.answers import EngineFailed  # noqa: E402
from hf_specdec.serving.errors import RequestRefused  # noqa: E402
from hf_specdec.serving.in_process import answer_to, messages_of  # noqa: E402


CHAT = {"messages": [{"role": "user", "content": "abc xyz"}], "max_tokens": 6, "temperature": 0}
COMPLETION = {"prompt": ["abc xyz", "xyz"], "max_tokens": 6, "seed": 5, "temperature": 0.9, "logprobs": 2, "n": 2}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, Answering]]:
    with client_over() as (client, engine):
        yield client, Answering(client.app, engine)


def answer(answers: Answering, record: Any) -> dict[str, Any]:
    return asyncio.run(answers.answer(json.dumps(record).encode() if not isinstance(record, bytes) else record))


@pytest.mark.parametrize("path, record", [("chat/completions", CHAT), ("completions", COMPLETION)])
def test_answers_are_those_of_the_server(served: tuple[Any, Answering], path: str, record: dict[str, Any]) -> None:
    client, answers = served
    told = client.post(f"/v1/{path}", json=record).json()
    found, named = answer(answers, record), answer(answers, record | {"id": [1, "a"]})
    assert found.keys() == {"choices", "usage"} and found["usage"].keys() == told["usage"].keys()
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):  # what is found in a cache changes
        assert found["usage"][name] == told["usage"][name]
    assert found["choices"] == told["choices"] == named["choices"] and named["id"] == [1, "a"]


@pytest.mark.parametrize(
    "record, reason",
    [
        (b"no object", "must be a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "`prompt` is given twice"),
        ({"max_tokens": 5}, "`messages` or `prompt`, but this has neither"),
        (CHAT | COMPLETION, "`messages` or `prompt`, but this has both"),
        (CHAT | {"stream": True}, "`stream` is not for records"),
        (CHAT | {"max_tokes": 5}, "Write `max_tokens`"),
        (CHAT | {"max_tokens": "5"}, "`max_tokens` must be an integer"),
        (CHAT | {"model": "other"}, "is not served here"),
        ({"prompt": "a" * 10_000}, "tokens"),
    ],
)
def test_bad_records(served: tuple[Any, Answering], record: Any, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        answer(served[1], record)


def test_what_is_no_fault_of_a_record() -> None:
    """Also not what an engine could not answer as it ended."""
    with client_over() as (client, engine):
        engine.fail_open()
        with pytest.raises(EngineFailed, match="shutting down"):
            answer(Answering(client.app, engine), CHAT)


def test_options_of_the_application(served: tuple[Any, Answering], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of a replica."""
    monkeypatch.setattr("hf_specdec.bulk.answers.running_engine", lambda options, tell: nullcontext(served[1].engine))
    options: Any = SimpleNamespace(target=str(TINY_TARGET))
    with answering(options, model_name="own", api_keys=["key"], max_body_bytes=100) as answers:
        assert asyncio.run(answer_to(answers.app, "/v1/completions", b'{"prompt": "t1"}'))[0] == 401
    with answering(options, model_name="own") as answers:
        assert answer(answers, {"prompt": "t1", "model": "own", "max_tokens": 1})["usage"]["completion_tokens"] == 1


def test_a_reader_that_goes_cancels_its_request(served: tuple[Any, Answering]) -> None:
    _, answers = served
    content = json.dumps(CHAT | {"max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()

    async def read_some() -> list[str]:
        messages = messages_of(answers.app, "/v1/chat/completions", content)
        kinds = [message["type"] async for _, message in _first(3, messages)]
        await messages.aclose()
        while answers.engine._open:
            await asyncio.sleep(0.01)
        return kinds

    assert asyncio.run(read_some()) == ["http.response.start", "http.response.body", "http.response.body"]


async def _first(number: int, messages: Any) -> Any:
    for place in range(number):
        yield place, await anext(messages)


def test_an_application_that_fails_before_it_answers() -> None:
    async def broken(*_: Any) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(anext(messages_of(broken, "/")))
