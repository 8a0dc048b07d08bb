"""Failures of the server and of requests that run, over HTTP, in one process and with a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.asking import COMPLETION, PATHS
from support.models import tiny_model
from support.servers import client_over
from transformers import ForcedEOSTokenLogitsProcessor, RepetitionPenaltyLogitsProcessor

from hf_specdec import NgramDraft


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

import openai  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent  # noqa: E402

from hf_specdec.serving.stop_strings import StopStringSearch  # noqa: E402


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "place",
    ["transformers.PreTrainedTokenizerFast.__call__", "hf_specdec.serving.own_requests.ParsedAnswers.__init__"],
)
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_errors_of_the_library_are_no_refusals(
    client: TestClient, path: str, place: str, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error("x" * 1000)

    monkeypatch.setattr(place, fails)
    response = client.post(f"/v1/{path}", json=PATHS[path])
    assert response.status_code == 500 and f"unexpected {error.__name__}" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_failures_of_the_server(client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a drafter are no fault of the request, whatever they are called."""

    def fails(*_: Any) -> None:
        raise KeyError("of the drafter")

    monkeypatch.setattr(NgramDraft, "propose", fails)
    response = client.post(f"/v1/{path}", json=PATHS[path])
    error = {"message": "KeyError: 'of the drafter'", "type": "server_error", "code": 500}
    assert response.status_code == 500 and response.json() == {"error": error}


@pytest.mark.parametrize(
    "option, method",
    [(RepetitionPenaltyLogitsProcessor, "__call__"), (StopStringSearch, "feed")],
    ids=["processor", "criterion"],
)
@pytest.mark.parametrize("error, status", [(ZeroDivisionError, 400), (RuntimeError, 400), (MemoryError, 500)])
def test_failures_of_a_requests_own_options(
    client: TestClient, option: type, method: str, error: type, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are called, but for a lack of memory."""

    def fails(*_: Any) -> None:
        raise error("somehow")

    monkeypatch.setattr(option, method, fails)
    config = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.5}
    for stream in (False, True):
        body = COMPLETION | {"generation_config": json.dumps(config), "stop": "~", "stream": stream}
        assert client.post("/v1/completions", json=body).status_code == status


def test_unexpected_errors(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise LookupError("nobody knows")

    monkeypatch.setattr("hf_specdec.serving.own_requests.checked", fails)
    for path in PATHS:
        response = client.post(f"/v1/{path}", json=PATHS[path])
        error = response.json()["error"]
        assert response.status_code == 500 and (error["type"], error["code"]) == ("server_error", 500)
        assert "unexpected LookupError" in error["message"] and "nobody knows" not in error["message"]


FAILS_LATER = json.dumps({"forced_eos_token_id": 2, "do_sample": False, "max_new_tokens": 6})
"""Options with which a request fails after its first token, with `fails_later`."""


@pytest.fixture
def fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end token that is forced fails, in words that are no JSON."""
    forces = ForcedEOSTokenLogitsProcessor.__call__

    def fails_at_the_end(self: Any, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[-1] == self.max_length - 1:
            raise IndexError('"2" is out of bounds')
        return forces(self, input_ids, scores)

    monkeypatch.setattr(ForcedEOSTokenLogitsProcessor, "__call__", fails_at_the_end)


def events_of(client: TestClient, path: str, **options: Any) -> list[str]:
    """The data of a stream's events."""
    with client.stream("POST", f"/v1/{path}", json=PATHS[path] | options | {"stream": True}) as response:
        assert response.status_code == 200
        return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_streams_end_with_done(client: TestClient, path: str, fails_later: None) -> None:
    for options in ({}, {"stop": "~"}, {"generation_config": FAILS_LATER}):
        *others, done = events_of(client, path, **options)
        last = json.loads(others[-1])
        assert done == "[DONE]" and "[DONE]" not in others
        assert ("error" in last) == ("generation_config" in options)
    error = last["error"]
    assert "out of bounds" in error.pop("message")
    assert error == {"type": "invalid_request_error", "code": 400}
    assert any(json.loads(one)["choices"][0].get("text", "") for one in others[:-1]) or path != "completions"


def test_responses_that_fail(client: TestClient, fails_later: None) -> None:
    """They end as OpenAI's own do, with events that its package knows, and without `[DONE]`."""
    for options in ({}, {"generation_config": FAILS_LATER}):
        events = [json.loads(one) for one in events_of(client, "responses", **options)]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    *_, before, error, failed = events
    assert before["type"] == "response.output_text.delta"
    assert error["type"] == "error" and "out of bounds" in error["message"]
    assert error["error"]["message"] == error["message"] and error["error"]["code"] == 400
    ResponseErrorEvent.model_validate(error)
    assert failed["type"] == "response.failed" and failed["response"]["id"] == events[0]["response"]["id"]
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    ResponseFailedEvent.model_validate(failed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({"generation_config": FAILS_LATER}, openai.APIError, "out of bounds"),
        ({"generation_config": "{}", "model": "another"}, openai.NotFoundError, "not served here"),
    ],
    ids=["later", "at once"],
)
def test_the_openai_package_raises_our_message(
    client: TestClient, path: str, options: dict[str, Any], kind: type[Exception], message: str, fails_later: None
) -> None:
    theirs = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)
    create = {
        "chat/completions": theirs.chat.completions.create,
        "completions": theirs.completions.create,
        "responses": theirs.responses.create,
    }[path]
    given = {"model": "some/tiny", **PATHS[path], **options}
    with pytest.raises(kind, match=message):
        for _ in create(extra_body={"generation_config": given.pop("generation_config")}, stream=True, **given):
            pass
    assert list(create(stream=True, model="some/tiny", **PATHS[path]))


def test_streams_whose_events_cannot_be_made(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end in the same way, with words that tell nothing of the server."""

    def fails(*_: Any) -> None:
        raise LookupError("nobody knows")

    monkeypatch.setattr("hf_specdec.serving.answers.AnswerPieces.add", fails)
    for path in PATHS:
        events = events_of(client, path)
        assert (events[-1] == "[DONE]") == (path != "responses")
        assert "unexpected LookupError" in events[-2] and "nobody knows" not in "".join(events)


def test_an_engine_that_has_ended() -> None:
    model = tiny_model()
    with client_over(model) as (client, _):
        assert client.get("/metrics").status_code == 200
        with model.register_forward_pre_hook(_fail):
            assert_refused_by_all(client, "The engine has ended. MemoryError: out of it")
        assert client.get("/health").status_code == 503


def test_a_server_that_ends() -> None:
    with client_over(tiny_model()) as (client, engine):
        engine.fail_open()
        assert_refused_by_all(client, "The server is shutting down.")


def assert_refused_by_all(client: TestClient, reason: str) -> None:
    """Asserts that requests and `/metrics` are answered alike: with status 503 and the reason."""
    for stream in (True, False):
        refused = client.post("/v1/completions", json=COMPLETION | {"stream": stream})
        error = {"message": reason, "type": "engine_error", "code": 503}
        assert refused.status_code == 503 and refused.json() == {"error": error}
        assert int(refused.headers["Retry-After"]) > 0
    refused = client.get("/metrics")
    assert refused.status_code == 503 and refused.json() == {"error": error}


def _fail(*_: Any) -> None:
    raise MemoryError("out of it")
