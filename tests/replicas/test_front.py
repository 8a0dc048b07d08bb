"""Requests whose replica dies, over HTTP, with replicas that are scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest


pytest.importorskip("fastapi")
pytest.importorskip("openai")

from fastapi import FastAPI, Request  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402

from hf_specdec.replicas import front as front_module  # noqa: E402
from hf_specdec.replicas.front import GONE, MOST_TRIES, Asked, Front  # noqa: E402


class Died(Exception):
    """A replica has."""


class Replicas:
    """Each answer is a list of parts, the first of which is its content type; `Died` instead of one is raised."""

    def __init__(self, *answers: list[Any]):
        self.answers = list(answers)
        self.asked: list[tuple[list[str], Asked]] = []

    async def ask(self, keys: list[str], asked: Asked) -> AsyncGenerator[dict[str, Any], None]:
        self.asked.append((keys, asked))
        for place, part in enumerate(self.answers.pop(0)):
            if part is Died:
                raise Died
            if place:
                yield {"type": "http.response.body", "body": part.encode(), "more_body": True}
            else:
                headers = [(b"content-type", part.encode()), (b"x-own", b"1"), (b"content-length", b"99")]
                yield {"type": "http.response.start", "status": 201, "headers": headers}

    def post(self, path: str = "/v1/completions") -> Any:
        app, front = FastAPI(), Front(self.ask, Died)

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def answer(request: Request) -> Any:
            return await front.answer(request)

        with TestClient(app) as client:
            return client.post(f"{path}?a=b", content=json.dumps({"prompt": "x" * 600}), headers={"X-Mine": "2"})


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "SECONDS_TO_RETRY", 0.001)


JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    "failures",
    [[], [[Died]], [[JSON, Died]], [[JSON, '{"a"', Died], [Died]], [[EVENTS, Died]], [[Died]] * (MOST_TRIES - 1)],
    ids=str,
)
def test_what_the_client_has_nothing_of_is_repeated(failures: list[list[Any]]) -> None:
    replicas = Replicas(*failures, [JSON, '{"a"', ": 1}"])
    response = replicas.post()
    assert (response.status_code, response.json(), response.headers["x-own"]) == (201, {"a": 1}, "1")
    assert response.headers["content-length"] == "8"
    keys, asked = replicas.asked[0]
    assert all(one == (keys, asked) for one in replicas.asked) and len(keys) == 2
    assert (asked.method, asked.path, asked.query) == ("POST", "/v1/completions", b"a=b")
    assert (b"x-mine", b"2") in asked.headers and json.loads(asked.content) == {"prompt": "x" * 600}


def test_a_request_that_all_replicas_die_of() -> None:
    response = Replicas(*[[Died]] * MOST_TRIES).post()
    assert response.status_code == 503 and response.headers["Retry-After"]
    assert "replicas have died with this request" in response.json()["error"]["message"]


def test_streams_pass_as_they_are() -> None:
    parts = ['data: {"a": 1}\n\n', 'data: {"b": 1}\n\ndata: [DONE]\n\n']
    assert Replicas([EVENTS, *parts]).post().text == "".join(parts)
    parts[1:] = ['data: {"b": 1}\n\n', "data: [DONE]\n\n", ""]
    assert Replicas([EVENTS, *parts]).post().text == "".join(parts)
    response = ['data: {"type": "response.created", "response": {"id": "r"}}\n\n', 'data: {"type": "x"}\n\n']
    assert Replicas([EVENTS, *response]).post("/v1/responses").text == "".join(response)


def test_a_stream_that_has_begun_ends_with_the_error() -> None:
    text = Replicas([EVENTS, 'data: {"a": 1}\n\n', Died]).post().text
    first, error, last, rest = text.split("\n\n")
    assert (first, last, rest) == ('data: {"a": 1}', "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"] == {"message": GONE, "type": "server_error", "code": 500}
    begun = 'data: {"type": "response.created", "response": {"id": "r"}}\n\n'
    text = Replicas([EVENTS, begun, Died]).post("/v1/responses").text
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["type"] == "response.failed" and last["response"]["id"] == "r"
