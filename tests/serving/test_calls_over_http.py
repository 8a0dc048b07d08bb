"""Calls and forms as users of the `openai` package meet them. (Over a connection: tests/serving/test_server.py.)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.call_templates import TEMPLATES
from support.servers import client_over
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.smollm2 import smollm2_folder


openai = pytest.importorskip("openai")
for package in ("fastapi", "prometheus_client", "llguidance"):
    pytest.importorskip(package)

MODEL = "smol"
ASKS: list[Any] = [{"role": "user", "content": "Paint it."}]
COUNT = "one two three four five six one two three four five six one two three"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "name": {"type": "string", "maxLength": 20}},
    "required": ["colour", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Of a server with a layer of SmolLM2, whose chat template writes calls."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32, num_hidden_layers=1).eval()
    with client_over(model, TEMPLATES["qwen3"], MODEL, tokenizer=tokenizer) as (client, _):
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)


def ask(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=ASKS, temperature=0.0, **options)


def test_demanded_calls(client: Any) -> None:
    """In a stream: its name first, and then its arguments as they are written; the package's own helper joins them."""
    tools = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    choice = ask(client, **options).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "paint"
    assert set(json.loads(call.function.arguments)) == {"colour", "name"}
    deltas = [one for chunk in ask(client, stream=True, **options) for one in chunk.choices[0].delta.tool_calls or ()]
    assert (deltas[0].function.name, deltas[0].function.arguments) == ("paint", "") and deltas[0].id
    assert len(deltas) > 3 and not any(one.id or one.function.name for one in deltas[1:])
    with client.chat.completions.stream(model=MODEL, messages=ASKS, temperature=0.0, **options) as stream:
        (joined,) = stream.get_final_completion().choices[0].message.tool_calls
    assert joined.function.arguments == call.function.arguments == "".join(one.function.arguments for one in deltas)


def test_streamed_responses(client: Any) -> None:
    tool = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}
    options: Any = {"model": MODEL, "input": "Paint it.", "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(parallel_tool_calls=False, **options) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        found = stream.get_final_response()
    (call,) = [item for item in found.output if item.type == "function_call"]
    assert call.name == "paint" and call.arguments == "".join(pieces) and len(pieces) > 3
    assert set(json.loads(call.arguments)) == {"colour", "name"}


def test_forms_and_cached_tokens(client: Any) -> None:
    """The prompt is the last one's, but for the end of it."""
    form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": {"enum": ["red", "blue"]}}}
    options: Any = {"model": MODEL, "prompt": f"{COUNT} {COUNT} {COUNT}", "max_tokens": 60, "temperature": 0.0}
    answers = [client.completions.create(**options, extra_body={"response_format": form}) for _ in range(2)]
    assert json.loads(answers[0].choices[0].text) in ("red", "blue")
    usages = [answer.usage for answer in answers]
    assert usages[1].prompt_tokens > usages[1].prompt_tokens_details.cached_tokens >= 32
    *_, last = client.completions.create(**options, stream=True)
    assert last.usage.prompt_tokens_details.cached_tokens == usages[1].prompt_tokens_details.cached_tokens
