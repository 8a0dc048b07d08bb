"""`tool_choice`: calls that a request demands, written by a random model in the form of its family."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from support.asking import calls_in
from support.call_templates import TEMPLATES
from support.models import tiny_model
from support.scripts import tokenizer
from support.servers import client_over


for package in ("fastapi", "openai", "prometheus_client", "llguidance"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402


WORD = {"type": "string", "maxLength": 4}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": WORD,
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "names": {"type": "array", "items": WORD, "maxItems": 2}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": PARAMETERS, "now": {"type": "object", "maxProperties": 0}}
BODY = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": TOOLS,
    "max_tokens": 300,
    "logit_bias": {"257": 6, "263": -100},  # the end, so that calls are few, and no reasoning
    "generation_config": {"do_sample": True, "eos_token_id": 257},
}


@pytest.fixture(scope="module", params=TEMPLATES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def client(kind: str) -> Iterator[Any]:
    model = tiny_model(vocab_size=len(tokenizer()), max_position_embeddings=4096)
    model.config.model_type = kind
    with client_over(model, TEMPLATES[kind], tokenizer=copy.deepcopy(tokenizer())) as (client, _):
        yield client


def chat(client: TestClient, stream: bool, **options: Any) -> tuple[list[tuple[str, str]], str, str]:
    """Calls, content and why the text ends."""
    body = BODY | options | {"stream": stream}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [one["choices"][0] for one in (found if stream else [response.json()])]
    parts = [choice.get("message") or choice["delta"] for choice in choices]
    content = "".join(part.get("content") or "" for part in parts)
    return calls_in(parts), content, choices[-1]["finish_reason"]


@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_are_those_of_the_tools(client: TestClient, kind: str, choice: str) -> None:
    """Whatever the model would write; streamed as unstreamed, and one where one is asked for."""
    named = {"type": "function", "function": {"name": "weather"}}
    for seed, parallel in ((0, True), (2, False)) if choice == "required" else ((1, True),):
        options = {"seed": seed, "tool_choice": "required" if choice == "required" else named}
        options["parallel_tool_calls"] = parallel
        calls, content, reason = chat(client, False, **options)
        assert chat(client, True, **options) == (calls, content, reason)
        assert content == "" and reason == ("stop" if choice == "named" else "tool_calls")
        assert len(calls) == 1 or (parallel and choice == "required" and kind != "llama" and calls)
        for name, arguments in calls:
            assert choice == "required" or name == "weather"
            jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))


def test_calls_that_are_cut(client: TestClient, kind: str) -> None:
    """JSON has the arguments so far, of other forms the text is content; why it ends tells that."""
    named = {"type": "function", "function": {"name": "weather"}}
    whole = chat(client, False, seed=1, tool_choice=named)[0][0][1]
    pieces = {"llama": 46, "qwen3": 56}.get(kind, 30)
    for length in (4, pieces):
        calls, content, reason = chat(client, False, seed=1, tool_choice=named, max_tokens=length)
        assert chat(client, True, seed=1, tool_choice=named, max_tokens=length) == (calls, content, reason)
        assert reason == "length" and bool(calls) == (not content) == (length > 4 and kind in ("llama", "qwen3"))
        assert not calls or whole.startswith(calls[0][1]) and len(calls[0][1]) < len(whole)


def test_responses(client: TestClient, kind: str) -> None:
    """Their spellings, and the same calls; in a stream, each item has its place among those of the whole response."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "a", "tools": tools, "tool_choice": {"type": "function", "name": "weather"}, "seed": 3}
    body |= {"max_output_tokens": 300, "generation_config": BODY["generation_config"]}
    whole = client.post("/v1/responses", json=body).json()
    response = client.post("/v1/responses", json=body | {"stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    message, call = output
    assert [(one["type"], one.get("arguments")) for one in output] == [
        (one["type"], one.get("arguments")) for one in whole["output"]
    ]
    assert (call["name"], call["status"]) == ("weather", "completed")
    jsonschema_rs.validate(PARAMETERS, json.loads(call["arguments"]))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [(one["output_index"], one["item"]["id"]) for one in added] == [(0, message["id"]), (1, call["id"])]
    assert added[1]["item"]["arguments"] == ""
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"] and (len(deltas) > 3) == (kind in ("llama", "qwen3"))


DEEP = {
    "$defs": {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(1000)},
    "$ref": "#/$defs/d0",
}
"""A schema whose compilation would end the process."""


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"tool_choice": "any"},
            "`tool_choice` must be 'none', 'auto', 'required' or an object that names a function",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "names the function 'fly', but `tools` has",
        ),
        ({"tool_choice": {"type": "custom", "name": "now"}}, "`tool_choice` must be 'none', 'auto', 'required'"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
        (
            {
                "tool_choice": "required",
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}],
            },
            "`tools[0].function.parameters.properties.a` cannot be followed: Invalid type: x",
        ),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": DEEP}}]},
            "`tools[0].function.parameters` cannot be followed: its parts are within each other 2001 times",
        ),
    ],
)
def test_refusals(client: TestClient, options: dict[str, Any], says: str) -> None:
    response = client.post("/v1/chat/completions", json=BODY | options)
    assert response.status_code == 400 and says in response.json()["error"]["message"], response.text
