"""Requests over HTTP, in one process and with a tiny model: what is asked for, and what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.models import VOCAB, tiny_model
from support.servers import client_over
from support.tokenizer import tiny_tokenizer
from transformers import ForcedEOSTokenLogitsProcessor, RepetitionPenaltyLogitsProcessor

from hf_specdec import NgramDraft


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

import openai  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from openai.types.responses import Response, ResponseErrorEvent, ResponseFailedEvent  # noqa: E402

from hf_specdec.batching import SpeculativeBatchingManager  # noqa: E402
from hf_specdec.serving.stop_strings import StopStringSearch  # noqa: E402


CHAT = {"messages": [{"role": "user", "content": "abc xyz"}], "max_tokens": 6, "temperature": 0}
COMPLETION = {"prompt": "abc xyz", "max_tokens": 6, "temperature": 0}
RESPONSE = {"input": "abc xyz", "max_output_tokens": 6, "temperature": 0}
PATHS = {"chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSE}
NUM_TOKENS = 4 * 200
"""For which there is memory."""


def ask(client: TestClient, path: str, **options: Any) -> Any:
    """The answer to a request that is served."""
    response = client.post(f"/v1/{path}", json=PATHS[path] | options)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    (choice,) = answer["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def refusal(client: TestClient, path: str, body: Any, status: int = 400) -> str:
    """Why a request is refused: with the same status and words whether it is to be streamed or not."""
    reasons = set()
    for stream in (False, True):
        content = json.dumps(body | {"stream": stream})
        response = client.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        reasons.add(response.json()["error"]["message"])
    (reason,) = reasons
    return reason


# --------------------------------------------------------------------------------------------------- what is answered


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


@pytest.mark.parametrize("body", ["{", "[1]", "", '"text"'])
def test_bodies_that_are_no_objects(client: TestClient, body: str) -> None:
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("The body must be a JSON object: ")


def test_unknown_paths_are_answered_alike(client: TestClient) -> None:
    assert client.get("/v1/completions").headers["Allow"] == "POST"
    assert client.get("/v1/nothing").json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "code": 404,
    }


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


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "config",
    [{"bad_words_ids": [[999999]]}, {"sequence_bias": [[[999999], 1.0]]}, {"max_time": "a"}],
    ids=lambda config: next(iter(config)),
)
def test_options_of_generate_that_are_wrong(client: TestClient, path: str, config: dict[str, Any]) -> None:
    (name,) = config
    config = {"max_new_tokens": 6, "do_sample": False, **config}
    for given in (config, json.dumps(config)):
        assert f"`generation_config.{name}" in refusal(client, path, PATHS[path] | {"generation_config": given})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_refusals_by_the_engine(client: TestClient, path: str, error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may cite all that the request has, of which no more than a beginning is told."""

    def refuses(*_: Any, **__: Any) -> None:
        raise error("x" * 1000)

    monkeypatch.setattr(SpeculativeBatchingManager, "add_request", refuses)
    assert 190 < refusal(client, path, PATHS[path]).count("x") <= 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "place", ["transformers.PreTrainedTokenizerFast.__call__", "hf_specdec.serving.app.ParsedAnswers.__init__"]
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


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception(messages[0].content) }}", "xxx"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ [1].index(messages[0].content) }}", "xxx"),
    ],
)
def test_what_a_template_cannot_show(template: str, reason: str) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 1000}]}
    with client_over(chat_template=template) as (client, _):
        told = refusal(client, "chat/completions", long)
    assert told.startswith("The model's chat template says: ") and reason in told and told.count("x") <= 200


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

    monkeypatch.setattr("hf_specdec.serving.app.checked", fails)
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


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([1], "object"),
        ({"a": 1}, "token ids"),
        ({"5": None}, "token ids"),
        ({"5": 1, str(VOCAB): 1}, rf"the {VOCAB} that .*\[{VOCAB}\]"),
        ({"-1": 1}, r"\[-1\]"),
    ],
)
def test_wrong_logit_biases(client: TestClient, wrong: Any, message: str) -> None:
    for path in ("chat/completions", "completions"):
        reason = refusal(client, path, PATHS[path] | {"logit_bias": wrong})
        assert re.search(message, reason) and "`logit_bias`" in reason


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "`prompt` is missing"),
        ({"prompt": None}, "`prompt` is missing"),
        ({"prompt": ""}, "no tokens. Give text in `prompt`"),
        ({"prompt": 5}, "`prompt` must be a string, a list of token ids, or a list of these, but is 5"),
        ({"prompt": []}, "`prompt` must be a list of 1 or more"),
        ({"prompt": ["abc", ""]}, "no tokens. Give text in `prompt`"),
        ({"prompt": ["abc"] * 65, "n": 2}, "ask for 130 texts, but a request may have 128"),
        ({"prompt": "abc", "best_of": 2}, "`best_of=2` is not supported"),
        (
            {"prompt": "abc \ud83c"},
            "`prompt` has half of a surrogate pair in it",
        ),
    ],
)
def test_wrong_prompts(client: TestClient, body: dict[str, Any], message: str) -> None:
    assert message in refusal(client, "completions", body)


def test_halves_of_surrogate_pairs_are_named(client: TestClient) -> None:
    """Wherever they are; whole pairs are characters."""
    half = "\udf33"
    for path, options, where in (
        ("chat/completions", messages(USER, USER | {"content": half}), "messages[1].content"),
        ("chat/completions", CHAT | {"tools": [{"function": {"name": "f", half: 1}}]}, "tools[0].function"),
        ("responses", RESPONSE | {"input": [{"type": "input_text", "text": half}]}, "input[0].text"),
        ("completions", COMPLETION | {"stop": ["a", half]}, "stop[1]"),
        ("completions", COMPLETION | {"model": half}, "model"),
        ("completions", COMPLETION | {half: 1}, "body"),
    ):
        assert f"`{where}` has half of a surrogate pair" in refusal(client, path, options)
    ask(client, "completions", stop=["\U0001f333"])


def messages(*of_them: Any) -> dict[str, Any]:
    return {"messages": list(of_them)}


USER = {"role": "user", "content": "abc"}
TOOL = {"type": "function", "name": "f", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "`messages` is missing"),
        ({"messages": None}, "`messages` is missing"),
        ({"messages": "hi"}, "`messages` must be a list"),
        (messages(), "`messages` must be a list of 1 or more"),
        (messages("hi"), "`messages[0]` must be an object"),
        (messages(USER, {"content": "x"}), "`messages[1].role` is missing"),
        (messages({"role": 5, "content": "x"}), "`messages[0].role` must be a string"),
        (messages({"role": "user", "content": 5}), "`messages[0].content` must be a string or a list"),
        (messages({"role": "user", "content": ["a"]}), "`messages[0].content[0]` must be an object"),
        (messages({"role": "user", "content": [{"text": "a"}]}), "`messages[0].content[0].type`"),
        (messages({"role": "user", "content": [{"type": "text"}]}), "`messages[0].content[0].text`"),
        (messages({"role": "user", "content": [{"type": "image_url"}]}), "'image_url'. This server reads text"),
        (messages({"role": "assistant", "tool_calls": [CALL]}), "`messages[0].tool_calls[0].function.arguments`"),
        (messages({"role": "assistant", "tool_calls": ["f"]}), "`messages[0].tool_calls[0]` must be an object"),
        (messages({"role": "assistant", "tool_calls": "f"}), "`messages[0].tool_calls` must be a list"),
        (messages({"role": "system", "content": "x"}), "no system message, please"),
        (messages({"role": "user", "content": ""}), "no tokens. Give text in `prompt`, `messages` or `input`"),
    ],
)
def test_wrong_messages(client: TestClient, body: dict[str, Any], message: str) -> None:
    assert message in refusal(client, "chat/completions", body)


def test_tool_calls(client: TestClient) -> None:
    """An empty list of them is none: the content counts."""
    for calls in (None, []):
        message = {"role": "assistant", "content": "abc xyz", "tool_calls": calls}
        assert text_of(ask(client, "chat/completions", messages=[message])) == text_of(ask(client, "chat/completions"))
    for arguments in ("{}", ""):  # the latter of functions without parameters, by some clients
        called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        answer = {"role": "tool", "tool_call_id": "1", "content": "abc"}
        ask(client, "chat/completions", messages=[USER, called, answer])


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "`input` is missing"),
        ({"input": []}, "`input` must be a list of 1 or more"),
        ({"input": [{"content": "a"}]}, "`input[0].type`"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, "must begin with a message"),
        ({"input": ["a"]}, "`input[0]` must be an object"),
        ({"input": [USER, {"content": "a"}]}, "`input[1].role`"),
        ({"input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]}, "`input[1].call_id`"),
        ({"input": [USER, {"type": "function_call", "name": "f", "call_id": "1"}]}, "`input[1].arguments`"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "1"}]}, "`input[1].output`"),
        ({"input": [USER, {"type": "reasoning", "content": [{}]}]}, "`input[1].content[0].text`"),
        ({"input": "abc", "instructions": 5}, "`instructions` must be a string"),
    ],
)
def test_wrong_inputs(client: TestClient, body: dict[str, Any], message: str) -> None:
    assert message in refusal(client, "responses", body)


@pytest.mark.parametrize(
    "given", ["abc", [{"type": "input_text", "text": "abc"}], [USER, {**USER, "type": "message"}]]
)
def test_inputs(client: TestClient, given: Any) -> None:
    ask(client, "responses", input=given)


@pytest.mark.parametrize(
    "path, option, alike",
    [
        ("chat/completions", {"functions": [{"name": "f"}]}, {"functions": []}),
        ("chat/completions", {"function_call": {"name": "f"}}, {"function_call": "auto"}),
        ("chat/completions", {"modalities": ["text", "audio"]}, {"modalities": ["text"]}),
        ("chat/completions", {"audio": {"voice": "alloy", "format": "wav"}}, {"audio": None}),
        ("chat/completions", {"reasoning_effort": "low"}, {"reasoning_effort": None}),
        ("chat/completions", {"web_search_options": {}}, {"web_search_options": None}),
        ("chat/completions", {"prediction": {"type": "content", "content": "abc"}}, {"prediction": None}),
        ("completions", {"suffix": "xyz"}, {"suffix": ""}),
        ("completions", {"best_of": 2}, {"best_of": 1}),
        ("completions", {"echo": True}, {"echo": False}),
        ("responses", {"previous_response_id": "resp_1"}, {"previous_response_id": None}),
        ("responses", {"background": True}, {"background": False}),
        ("responses", {"prompt": {"id": "pmpt_1"}}, {"prompt": None}),
        ("responses", {"conversation": "conv_1"}, {"conversation": None}),
        ("responses", {"truncation": "auto"}, {"truncation": "disabled"}),
        ("responses", {"max_tool_calls": 1}, {"max_tool_calls": None}),
        ("responses", {"reasoning": {"effort": "low"}}, {"reasoning": {}}),
    ],
)
def test_options_that_are_not_supported(
    client: TestClient, path: str, option: dict[str, Any], alike: dict[str, Any]
) -> None:
    (name,) = option
    reason = refusal(client, path, PATHS[path] | option)
    assert f"`{name}" in reason and "not supported" in reason
    assert text_of(ask(client, path, **alike)) == text_of(ask(client, path))


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_options_without_effect(client: TestClient, path: str) -> None:
    options = {"store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "safety_identifier": "me"}
    options |= dict.fromkeys(("parallel_tool_calls", "chat_template_kwargs", "tool_choice", "stream"))
    options |= {"reasoning": {"effort": None, "summary": None}} if path == "responses" else {}
    assert text_of(ask(client, path, **options)) == text_of(ask(client, path))


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize(
    "option, message",
    [
        ({"tools": "x"}, "`tools` must be a list"),
        ({"tools": ["x"]}, "`tools[0]` must be an object"),
        ({"tools": [{"type": "web_search"}]}, "`tools[0].type='web_search'` is not supported"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "`chat_template_kwargs.chat_template` is not supp"),
        ({"chat_template_kwargs": "chat_template"}, "`chat_template_kwargs` must be an object"),
        ({"tools": [TOOL, {"type": None, "name": 5}]}, "`tools[1]."),
        ({"tools": [TOOL, 3]}, "`tools[1]` must be an object"),
        ({"tool_choice": "required"}, "`tool_choice='required'` without `tools`"),
    ],
)
def test_options_that_the_template_cannot_take(
    client: TestClient, path: str, option: dict[str, Any], message: str
) -> None:
    assert message in refusal(client, path, PATHS[path] | option)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_tools(client: TestClient, path: str) -> None:
    """The model is shown its tools unless none is to be called; what cannot be enforced is refused."""
    own = {"name": "abc", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function"} | (own if path == "responses" else {"function": own})
    bare, shown, none = (
        ask(client, path, **options)["usage"]["input_tokens" if path == "responses" else "prompt_tokens"]
        for options in ({}, {"tools": [tool], "tool_choice": "auto"}, {"tools": [tool], "tool_choice": "none"})
    )
    assert bare == none < shown
    ask(client, path, tool_choice="auto", parallel_tool_calls=False)  # of no tools
    for option in ({"tool_choice": "required"}, {"tool_choice": tool}):
        assert "is not supported" in refusal(client, path, PATHS[path] | {"tools": [tool]} | option)


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
