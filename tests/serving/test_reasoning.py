"""A form of the answer, and calls that are demanded, are of what comes after the reasoning."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.asking import calls_in
from support.call_templates import TEMPLATES
from support.models import tiny_model
from support.scripts import tokenizer
from support.servers import client_over


for package in ("fastapi", "openai", "prometheus_client", "llguidance"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402


END, THINK, CLOSE = 257, 263, 264
ASSISTANT = "<|im_start|>assistant\n"
PROMPTS = {"begun": ASSISTANT + "<think>\n", "ended": ASSISTANT + "<think>\n\n</think>\n\n", "open": ASSISTANT}
"""What the chat template may write before an answer."""
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "ab"}}}
REGEX = {"structured_outputs": {"regex": "[ab]{3}c"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "boolean"}}}}}


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_model(vocab_size=len(tokenizer()), max_position_embeddings=4096)
    model.config.model_type = "qwen3"
    return model


@pytest.fixture(scope="module", params=PROMPTS)
def asked(request: pytest.FixtureRequest, model: Any) -> Iterator[tuple[str, Any]]:
    before, _, after = TEMPLATES["qwen3"].rpartition(repr(ASSISTANT))
    template = before + repr(PROMPTS[request.param]) + after
    with client_over(model, template, tokenizer=copy.deepcopy(tokenizer())) as (client, _):
        yield request.param, client


def parts(client: TestClient, path: str, thinks: bool, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls; the same streamed. Reasoning begins at once or never, and ends after a while."""
    bias = {str(THINK): 30, str(CLOSE): 28} if thinks else {str(THINK): -100, str(CLOSE): 4}
    body: dict[str, Any] = {"seed": 1, "generation_config": {"do_sample": True}, "max_tokens": 150}
    body |= {"messages": [{"role": "user", "content": "a"}]} if path == "chat/completions" else {"prompt": "a"}
    body |= {"logit_bias": bias | {str(END): -100}} | options  # the end comes where nothing else may
    found = []
    for stream in (False, True):
        response = client.post(f"/v1/{path}", json=body | {"stream": stream})
        assert response.status_code == 200, response.text
        lines = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [one["choices"][0] for one in (lines if stream else [response.json()])]
        says = [choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices]
        texts = ["".join(one.get(name) or "" for one in says) for name in ("reasoning_content", "content")]
        found.append((*texts, calls_in(says)))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "thinks, options, pattern",
    [(True, {"response_format": FORM}, '"ab"'), (False, REGEX, "[ab]{3}c")],
    ids=["thinks", "does not"],
)
def test_forms(asked: tuple[str, Any], thinks: bool, options: dict[str, Any], pattern: str) -> None:
    """The reasoning is free, and what comes after it is content of the form."""
    prompt, client = asked
    reasoning, content, calls = parts(client, "chat/completions", thinks, **options)
    assert re.fullmatch(pattern, content) and not calls, (reasoning, content)
    assert bool(reasoning) == (prompt == "begun" or (prompt == "open" and thinks))


def test_demanded_calls(asked: tuple[str, Any]) -> None:
    prompt, client = asked
    options = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    reasoning, content, calls = parts(client, "chat/completions", False, **options)
    assert bool(reasoning) == (prompt == "begun") and not content
    assert [name for name, _ in calls] == ["f"] and isinstance(json.loads(calls[0][1]), dict)


@pytest.mark.parametrize("asked", ["begun"], indirect=True)
def test_completions_do_not_reason(asked: tuple[str, Any]) -> None:
    _, client = asked
    assert parts(client, "completions", True, response_format=FORM)[1] == '"ab"'
