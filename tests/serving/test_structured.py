"""Answers of a form that the request names, over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402
from llguidance import LLMatcher  # noqa: E402
from support.grammar import chain, rules  # noqa: E402

from hf_specdec.serving.requests import schema_places  # noqa: E402
from hf_specdec.serving.requests.schema_places import place_in_schema  # noqa: E402


ENDS = {"max_tokens": 24, "generation_config": {"eos_token_id": 2, "do_sample": False}}
CHAT = {"messages": [{"role": "user", "content": "abc xyz"}], **ENDS}
COMPLETION = {"prompt": "abc xyz", **ENDS}
INVALID = {
    "properties": {"x": {"$ref": "#/$defs/a~1b%20c"}, "y": {"type": "integer"}},
    "$defs": {"a/b c": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "objekt"}]}}},
}
LETTERS = {"type": "string", "pattern": "^[a-e]{3,6}$"}


def text_of(client: TestClient, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The text and why it ends, whole; asserts that they are the same streamed."""
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    found = choice["message"]["content"] if "message" in choice else choice["text"]
    with client.stream("POST", f"/v1/{path}", json=body | {"stream": True}) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    parts = [one["choices"][0] for one in lines if one["choices"]]
    text = "".join((part.get("delta") or {}).get("content") or part.get("text") or "" for part in parts)
    assert (text, parts[-1]["finish_reason"]) == (found, choice["finish_reason"])
    return found, choice["finish_reason"]


@pytest.mark.parametrize("path, body", [("chat/completions", CHAT), ("completions", COMPLETION)])
def test_texts(client: TestClient, path: str, body: dict[str, Any]) -> None:
    for form, pattern in (
        ({"regex": "(ab|ba){2} cc"}, "(ab|ba){2} cc"),
        ({"choice": ["hello", "ab.cd", "xy"]}, r"hello|ab\.cd|xy"),
        ({"grammar": 'root ::= "k" [a-c] "m"'}, "k[a-c]m"),
        ({"grammar": 'start: "k" /[a-c]+/ "m"'}, "k[a-c]+m"),
    ):
        text, reason = text_of(client, path, body | {"structured_outputs": form})
        assert re.fullmatch(pattern if reason == "stop" else "k[a-c]+", text), (form, text)
    assert text_of(client, path, body | {"structured_outputs": {"regex": "abcdefghijklmn"}, "max_tokens": 5}) == (
        "abcde",
        "length",
    )


def test_what_the_vocabulary_cannot_write_fails(client: TestClient) -> None:
    """The tiny tokenizer has no braces."""
    schema = {"type": "object", "properties": {"name": LETTERS}}
    forms: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
        ("chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
        ("chat/completions", CHAT | {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}),
        ("responses", {"input": "abc", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}),
        ("responses", {"input": "abc", "text": {"format": {"type": "json_object"}}}),
    ]
    for path, body in forms:
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400, answer.text
        assert "`grammar`" in answer.json()["error"]["message"]
    assert text_of(client, "chat/completions", CHAT)[1] == "length"  # others go on


@pytest.mark.parametrize(
    "path, options, says",
    [
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "`response_format.json_schema.schema` cannot be followed: Invalid type: objekt.",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            '`response_format.json_schema.schema` cannot be followed: Unimplemented keys: ["uniqueItems"].',
        ),
        (
            "completions",
            {"structured_outputs": {"json": json.dumps(INVALID)}},
            "`structured_outputs.json.$defs.a/b c.items.anyOf[1]` cannot be followed: Invalid type: objekt.",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema"}},
            "`response_format.json_schema` is missing: give an object with a `schema`.",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "`text.format.schema` is missing: give a JSON schema.",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "`response_format` and `structured_outputs` say of one answer what form it has. Give one.",
        ),
        (
            "completions",
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "`structured_outputs` must have one of `json`, `regex`, `choice`, `grammar` and `json_object`, but has "
            "`regex` and `choice`.",
        ),
        (
            "completions",
            {"structured_outputs": {"choice": ["a" * 40_000, "b" * 40_000]}},
            "`structured_outputs.choice` may have 65536 characters in all. Give fewer or shorter choices.",
        ),
    ],
)
def test_what_is_wrong(client: TestClient, path: str, options: dict[str, Any], says: str) -> None:
    body = {"chat/completions": CHAT, "completions": COMPLETION, "responses": {"input": "abc"}}[path]
    answer = client.post(f"/v1/{path}", json=body | options)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, says)


@pytest.mark.parametrize(
    "path, options, says",
    [
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": chain(6_000)}}},
            "`response_format.json_schema.schema` cannot be followed: its parts are within each other 12002 times",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": chain(6_000)}}},
            "`text.format.schema` cannot be followed: its parts are within each other 12002 times",
        ),
        (
            "completions",
            {"structured_outputs": {"json": json.dumps(chain(900))}},
            "`structured_outputs.json` cannot be followed: its parts are within each other 1802 times",
        ),
        (
            "completions",
            {"structured_outputs": {"json": "[" * 5000 + "]" * 5000}},
            "`structured_outputs.json` cannot be followed: `structured_outputs.json` has more than 64",
        ),
        (
            "completions",
            {"structured_outputs": {"grammar": rules(3_000)}},
            "`structured_outputs.grammar` cannot be followed: its rules and groups are within each other 3001 times",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 600_000]}}}},
            "`response_format.json_schema.schema` cannot be followed: it has 600014 characters, but may have 524288.",
        ),
    ],
)
def test_what_would_end_the_process(client: TestClient, path: str, options: dict[str, Any], says: str) -> None:
    """llguidance's recursion overruns the stack, and no error can be caught."""
    body = {"chat/completions": CHAT, "completions": COMPLETION, "responses": {"input": "abc"}}[path]
    answer = client.post(f"/v1/{path}", json=body | options)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(says), answer.text


def test_what_is_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of an error is looked for in parts that are compiled soon, alone or with what they refer to."""
    lengths: list[int] = []
    validate = LLMatcher.validate_grammar_with_warnings

    def noted(grammar: str) -> Any:
        lengths.append(len(grammar))
        return validate(grammar)

    monkeypatch.setattr(LLMatcher, "validate_grammar_with_warnings", noted)
    monkeypatch.setattr(schema_places, "MOST_SECONDS", 60.0)
    wrong = {"anyOf": [{"type": "string"}, {"type": "objekt"}]}
    large = {"enum": [f"value {number}" for number in range(20_000)]}
    reason = "Invalid type: objekt"
    assert place_in_schema({"properties": {"a": large, "b": wrong}}, reason) == ("properties", "b", "anyOf", 1)
    for inner in ({"properties": {"a": large, "b": wrong}}, wrong | {"$ref": "#/properties/c"}):
        assert place_in_schema({"properties": {"b": inner, "c": large}}, reason) == ()
    assert max(lengths) < 2 * schema_places.MOST_CHARACTERS


def test_forms_that_ask_for_nothing(client: TestClient) -> None:
    usual = text_of(client, "chat/completions", CHAT)
    assert text_of(client, "chat/completions", CHAT | {"response_format": {"type": "text"}}) == usual
    answer = client.post(
        "/v1/responses", json={"input": "abc", "max_output_tokens": 6, "text": {"format": {"type": "text"}}}
    )
    assert answer.status_code == 200
