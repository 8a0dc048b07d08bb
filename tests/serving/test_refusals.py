"""Requests over HTTP, in one process and with a tiny model: what is wrong with them."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest
from support.asking import CHAT, COMPLETION, PATHS, RESPONSE, ask, refusal, text_of
from support.models import VOCAB
from support.servers import client_over


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402

from hf_specdec.batching import SpeculativeBatchingManager  # noqa: E402


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
        ("chat/completions", {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
        ("chat/completions", {"echo": True}, {"echo": False, "parse_tool_calls": True, "reasoning_format": "auto"}),
        ("chat/completions", {"add_generation_prompt": False}, {"add_generation_prompt": True, "documents": []}),
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
        ("responses", {"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "none", "summary": "auto"}}),
    ],
)
def test_options_that_are_not_supported(
    client: TestClient, path: str, option: dict[str, Any], alike: dict[str, Any]
) -> None:
    (name,) = option
    reason = refusal(client, path, PATHS[path] | option)
    assert f"`{name}" in reason and "not supported" in reason
    assert text_of(ask(client, path, **alike)) == text_of(ask(client, path))


ELSEWHERE: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "frequency_penalty": 0,
    "truncate_prompt_tokens": None,
    "detokenize": True,
    "guided_json": None,
    "typical_p": 1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "dry_multiplier": 0.0,
    "dry_sequence_breakers": ["\n", ":"],
    "top_n_sigma": -1.0,
    "samplers": None,
    "repeat_last_n": -1,
    "cache_prompt": True,
    "n_keep": -1,
    "use_beam_search": False,
    "grammar": "",
    "lora": [],
    "session_id": "mine",
}
"""What clients of vLLM and llama.cpp send and do not need."""


@pytest.mark.parametrize("path", PATHS)
def test_options_of_other_servers(client: TestClient, path: str) -> None:
    """Values that ask for what happens anyway; others are refused with what to do instead."""
    of_texts = {} if path == "responses" else {"best_of": 1, "logit_bias": {}, "n_predict": 6}
    assert text_of(ask(client, path, **ELSEWHERE, **of_texts)) == text_of(ask(client, path))
    for option, remedy in (
        ({"repeat_penalty": 1.1}, "`repetition_penalty`"),
        ({"guided_json": {"type": "object"}}, "`structured_outputs`"),
        ({"typical_p": 0.5}, "`generation_config`"),
        ({"cache_prompt": False}, "`--no-enable-prefix-caching`"),
        ({"request_id": "a"}, "`X-Request-ID`"),
        ({"json_schema": {}}, "`structured_outputs`"),
        ({"samplers": []}, "their order"),
        ({"repeat_last_n": 8}, "the whole text"),
        ({"guided_whitespace_pattern": " "}, "`structured_outputs.whitespace_pattern`"),
    ):
        (name,) = option
        reason = refusal(client, path, PATHS[path] | option)
        assert reason.startswith(f"`{name}=") and "not supported" in reason and remedy in reason


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_length_under_its_name_in_llama_cpp(client: TestClient, path: str) -> None:
    assert ask(client, path, max_tokens=None, n_predict=3)["usage"]["completion_tokens"] == 3
    reason = refusal(client, path, PATHS[path] | {"n_predict": 3})
    assert reason == "`max_tokens=6` and `n_predict=3` differ. Leave one of them out."


@pytest.mark.parametrize("path", PATHS)
def test_no_limit(client: TestClient, path: str) -> None:
    """-1, as llama.cpp's clients send it: the default."""
    names = ["max_output_tokens"] if path == "responses" else ["max_tokens", "n_predict"]
    names += ["max_completion_tokens"] if path == "chat/completions" else []
    left_out = dict.fromkeys(names)
    expected = text_of(ask(client, path, **left_out))
    for name in names:
        assert text_of(ask(client, path, **left_out | {name: -1})) == expected
        short = ask(client, path, **left_out | {name: -1, "generation_config": {"max_new_tokens": 3}})
        assert expected.startswith(text_of(short)) and text_of(short) != expected
    if len(names) > 1:
        assert text_of(ask(client, path, **left_out | {"max_tokens": 6, "n_predict": -1})) == text_of(
            ask(client, path)
        )


def test_efforts_of_reasoning() -> None:
    """As in vLLM: a variable of the chat template, and a switch."""
    think = "{{ messages[0].content }}{% if enable_thinking %} think {{ reasoning_effort }}{% endif %}"
    with client_over(chat_template=think) as (client, _):

        def length(path: str, **options: Any) -> int:
            usage = ask(client, path, **options)["usage"]
            return usage.get("prompt_tokens") or usage["input_tokens"]

        chat = partial(length, "chat/completions")
        shown = len(" think low".split())
        for path, name in (("chat/completions", "reasoning_effort"), ("responses", "reasoning")):
            low, none = ({name: one} if "effort" in name else {name: {"effort": one}} for one in ("low", "none"))
            long = length(path, chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "low"})
            assert length(path, **low) == long >= length(path) + shown
            assert length(path, **none) == length(path)
            assert length(path, **low, chat_template_kwargs={"enable_thinking": False}) == length(path)
        assert chat(reasoning_effort="low") < chat(reasoning_effort="minimal")
        kwargs = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert "differ" in refusal(client, "chat/completions", CHAT | {"reasoning_effort": "low"} | kwargs)


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
