"""Requests over HTTP, in one process and with a tiny model: what is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.asking import PATHS, RESPONSE, ask, refusal, text_of
from support.models import VOCAB
from support.tokenizer import tiny_tokenizer


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402
from openai.types.responses import Response  # noqa: E402


NUM_TOKENS = 4 * 200
"""For which there is memory."""


def test_responses_are_streamed_if_that_is_asked_for(client: TestClient) -> None:
    answers = [ask(client, "responses", **options) for options in ({}, {"stream": False}, {"stream": None})]
    assert len({text_of(answer) for answer in answers}) == 1 and answers[0]["object"] == "response"
    with client.stream("POST", "/v1/responses", json=RESPONSE | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream"), response.read()
        assert "response.created" in response.read().decode()


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses_that_are_cut_are_incomplete(client: TestClient, stream: bool) -> None:
    """Not those that end by themselves, even at the last allowed token."""
    text = text_of(ask(client, "responses"))
    (last,) = tiny_tokenizer()(text[-1])["input_ids"]
    ends = {"generation_config": json.dumps({"eos_token_id": [last], "do_sample": False})}
    for options, status in (({}, "incomplete"), (ends, "completed"), ({"max_output_tokens": 500} | ends, "completed")):
        with client.stream("POST", "/v1/responses", json=RESPONSE | options | {"stream": stream}) as found:
            lines = [line.removeprefix("data: ") for line in found.iter_lines() if line.startswith(("data: ", "{"))]
        answer = json.loads(lines[-1])
        if stream:
            assert answer["type"] == f"response.{status}" and answer["sequence_number"] == len(lines) - 1
            answer = answer["response"]
        assert answer["status"] == status and text.startswith(text_of(answer))
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        assert answer.get("incomplete_details") == details
        Response.model_validate(answer)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_logit_bias(client: TestClient, path: str) -> None:
    usual, tokenizer = text_of(ask(client, path)), tiny_tokenizer()
    assert text_of(ask(client, path, logit_bias={})) == text_of(ask(client, path, logit_bias=None)) == usual
    (token,) = tokenizer("q")["input_ids"]
    for bias in (100, 100.0, "100"):
        assert text_of(ask(client, path, logit_bias={str(token): bias})) == "q" * 6


@pytest.mark.smoke
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_why_it_ends(client: TestClient, path: str) -> None:
    """By a stop string, too, that the last allowed token completes, or by an end token."""

    def reason(**options: Any) -> tuple[str, int]:
        answer = ask(client, path, **options)
        with client.stream("POST", f"/v1/{path}", json=PATHS[path] | options | {"stream": True}) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        found = answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
        last = json.loads(lines[-1])
        assert found == (last["choices"][0]["finish_reason"], last["usage"]["completion_tokens"])
        return found

    text = text_of(ask(client, path))
    (last,) = tiny_tokenizer()(text[-1])["input_ids"]
    assert reason() == ("length", 6)
    assert reason(stop=text) == ("stop", 6)
    config = json.dumps({"max_new_tokens": 6, "eos_token_id": [last], "do_sample": False})
    assert reason(generation_config=config)[0] == "stop"
    assert reason(max_tokens=None, generation_config=json.dumps({"max_length": 12}))[0] == "length"


@pytest.mark.parametrize("stop", ["", []])
def test_no_stop_strings_in_options_of_generate(client: TestClient, stop: Any) -> None:
    config = {"stop_strings": stop, "do_sample": False}
    assert text_of(ask(client, "completions", generation_config=config)) == text_of(ask(client, "completions"))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_length_by_default(client: TestClient, path: str) -> None:
    """As much as fits: more than that is refused if it is asked for."""
    for options in ({}, {"generation_config": '{"do_sample": false}'}):
        bias = {"2": -100}  # no end
        answer = ask(client, path, max_tokens=None, logit_bias=bias, **options)
        assert answer["usage"]["total_tokens"] == NUM_TOKENS
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "path, field, config",
    [
        ("chat/completions", "max_tokens", {}),
        ("chat/completions", "max_completion_tokens", {"max_tokens": None}),
        ("completions", "max_tokens", {"generation_config": {"max_new_tokens": 5}}),
        ("responses", "max_output_tokens", {}),
        ("responses", "generation_config.max_new_tokens", {"max_output_tokens": None}),
        ("completions", "generation_config.max_length", {"max_tokens": None}),
    ],
)
def test_lengths_that_do_not_fit(client: TestClient, path: str, field: str, config: dict[str, Any]) -> None:
    """The field that asks for them is named."""
    outer, _, inner = field.rpartition(".")
    wrong = {outer: {inner: 5000}} if outer else {inner: 5000}
    reason = refusal(client, path, PATHS[path] | config | wrong)
    assert f"`{field}=5000` with a prompt of " in reason and f"the {NUM_TOKENS} tokens that there is memory" in reason


@pytest.mark.parametrize("path", PATHS)
def test_seeds_in_options_of_generate(client: TestClient, path: str) -> None:
    options = {"do_sample": True, "max_new_tokens": 20, "temperature": 2.0}

    def text(seed: int) -> str:
        own = {"generation_config": options | {"seed": seed}, "temperature": None}
        return text_of(ask(client, path, **own))

    alike = ask(client, path, generation_config=json.dumps(options), seed=5, temperature=None)
    assert text(5) == text(5) == text_of(alike) != text(6)


def test_the_description(client: TestClient) -> None:
    """Has the typed bodies, with bounds and roles of the model, and all answers."""
    found = client.get("/openapi.json").json()
    schemas = found["components"]["schemas"]
    for path in ("/load_model", *(f"/v1/{path}" for path in PATHS)):
        (operation,) = found["paths"][path].values()
        (name,) = {body["schema"]["$ref"].split("/")[-1] for body in operation["requestBody"]["content"].values()}
        assert schemas[name]["additionalProperties"] is False and set(operation["responses"]) >= {"200", "400", "503"}
    options = schemas["GenerationOptions"]["properties"]
    assert options["pad_token_id"]["anyOf"][0] == {"minimum": 0, "maximum": VOCAB - 1, "type": "integer"}
    assert options["num_beams"]["enum"] == [None, 1]
    assert "user" in schemas["Message"]["properties"]["role"]["enum"]
    says, calls = schemas["Message"]["anyOf"]
    assert says["required"] == ["content"] and calls["properties"]["role"] == {"const": "assistant"}
    assert not any("audio" in path for path in found["paths"])


def test_completion_tokens_by_their_other_name(client: TestClient) -> None:
    answer = ask(client, "chat/completions", max_tokens=None, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


def test_names(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "some/tiny" and client.get("/v1/models/some/tiny").json() == model
    for path in PATHS:
        for name in ("some/tiny", "some/tiny@main", None):
            assert ask(client, path, model=name)["model"] == "some/tiny"
        assert "'another'" in refusal(client, path, PATHS[path] | {"model": "another"}, 404)
    missing = client.get("/v1/models/another")
    assert missing.status_code == 404 and "some/tiny" in missing.json()["error"]["message"]


def test_load_model(client: TestClient) -> None:
    assert '"ready"' in client.post("/load_model", json={"model": "some/tiny"}).text
    for body, reason in (({"model": 5}, "must be a string"), ({"model": "another"}, "some/tiny"), ({}, "is missing")):
        response = client.post("/load_model", json=body)
        message = response.json()["error"]["message"]
        status = 404 if body.get("model") == "another" else 400
        assert response.status_code == status and "`model" in message and reason in message
