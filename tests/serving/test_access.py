"""API keys, pages of other origins, and answers that take too long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.models import tiny_model
from support.servers import client_over


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

import openai  # noqa: E402


KEY, PAGE = "a secret ü", "https://page.example"
COMPLETION = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Any]:
    with client_over(tiny_model(), api_keys=["another", KEY], origins=[PAGE]) as (client, _):
        yield client


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/load_model", "/reset", "/v1/nothing"])
def test_keys(guarded: Any, path: str) -> None:
    for headers in ({}, bearer("wrong"), bearer(""), bearer(KEY[:-1]), {"Authorization": KEY.encode()}):
        answer = guarded.post(path, content=b"{", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for headers in (bearer(KEY), bearer("another"), {"Authorization": b"bearer another"}):
        assert guarded.post(path, content=b"{", headers=headers).status_code != 401


def test_what_needs_no_key(guarded: Any) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200
    for path in ("/v1/models", "/openapi.json", "/docs", "/health/"):
        assert guarded.get(path).status_code == 401


def test_the_openai_package_gives_its_key(guarded: Any) -> None:
    options: dict[str, Any] = {"base_url": "http://testserver/v1", "http_client": guarded, "max_retries": 0}
    theirs = openai.OpenAI(api_key="another", **options)
    assert theirs.completions.create(model="tiny", **COMPLETION).choices
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        openai.OpenAI(api_key="wrong", **options).models.list()


def test_origins(guarded: Any) -> None:
    """A preflight needs no key, and a page can read why it is refused."""
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in ((PAGE, PAGE), ("https://other.example", None)):
        before = guarded.options("/v1/completions", headers={"Origin": origin} | asks)
        assert (before.status_code == 200) == (allowed is not None)
        for headers, status in (({}, 401), (bearer("another"), 200)):
            answer = guarded.post("/v1/completions", json=COMPLETION, headers={"Origin": origin} | headers)
            assert answer.status_code == status
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed


def test_answers_that_take_too_long() -> None:
    """They end, and so do their requests: the context asserts that none is left."""
    model = tiny_model(max_position_embeddings=4096)
    body = COMPLETION | {"max_tokens": 700, "ignore_eos": True, "n": 2}
    with client_over(model, answer_seconds=0.3) as (client, engine):
        assert client.post("/v1/completions", json=COMPLETION | {"max_tokens": 1}).status_code == 200
        with model.register_forward_pre_hook(lambda *_: time.sleep(0.05)):
            answer = client.post("/v1/completions", json=body)
            error = answer.json()["error"]
            assert answer.status_code == error["code"] == 504 and "longer than the 0.3 seconds" in error["message"]
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]" and json.loads(lines[-2])["error"]["code"] == 504
        until = time.monotonic() + 10
        while engine._open and time.monotonic() < until:
            time.sleep(0.01)
