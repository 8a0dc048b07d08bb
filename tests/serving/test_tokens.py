"""Routes about tokens and the server, which vLLM has, too."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from support.tokenizer import tiny_tokenizer


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)


def ask(client: Any, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_of_a_text(client: Any) -> None:
    """They are those of a completion, whose usage counts them."""
    tokens = tiny_tokenizer()("abc xyz")["input_ids"]
    found = ask(client, "/tokenize", prompt="abc xyz", model="some/tiny")
    assert found == {"count": 7, "max_model_len": 800, "tokens": tokens, "token_strs": None}
    found = ask(client, "/tokenize", prompt="ab", add_special_tokens=False, return_token_strs=True)
    assert found["token_strs"] == ["a", "b"]
    assert ask(client, "/detokenize", tokens=tokens) == {"prompt": "abc xyz"}
    answer = ask(client, "/v1/completions", prompt="abc xyz", max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_tokens_of_a_chat(client: Any) -> None:
    """With its tools: those that a chat's prompt has."""
    tools = [{"type": "function", "function": {"name": "abc"}}]
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "xyz"}]}], "tools": tools}
    found = ask(client, "/tokenize", **chat)
    assert ask(client, "/detokenize", tokens=found["tokens"]) == {"prompt": "abcxyz"}
    assert ask(client, "/v1/chat/completions", max_tokens=1, **chat)["usage"]["prompt_tokens"] == found["count"]


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("/tokenize", {}, "`prompt` or `messages` must be given"),
        ("/tokenize", {"prompt": "a", "model": "another"}, "`model='another'` is not served here"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "for a `prompt`"),
        ("/tokenize", {"messages": [{"role": "system", "content": "a"}]}, "no system message, please"),
        ("/detokenize", {}, "`tokens` is missing"),
        ("/detokenize", {"tokens": [61]}, "`tokens[0]` must be one of the 61 tokens"),
        ("/detokenize", {"tokens": [5], "model": "another"}, "`model='another'` is not served here"),
    ],
)
def test_what_is_refused(client: Any, path: str, body: dict[str, Any], message: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == (404 if "model" in body else 400)
    assert message in answer.json()["error"]["message"]


def test_about_the_server(client: Any) -> None:
    assert client.get("/version").json() == {"version": version("hf-specdec")}
    assert client.get("/ping").status_code == client.get("/health").status_code == 200
    (model,) = client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 800 and model["root"] == model["id"] and model["created"] > 1.7e9
