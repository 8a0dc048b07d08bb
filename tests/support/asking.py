"""Requests to the server's application in this process, and what is answered."""

from __future__ import annotations

import json
from typing import Any


CHAT = {"messages": [{"role": "user", "content": "abc xyz"}], "max_tokens": 6, "temperature": 0}
COMPLETION = {"prompt": "abc xyz", "max_tokens": 6, "temperature": 0}
RESPONSE = {"input": "abc xyz", "max_output_tokens": 6, "temperature": 0}
PATHS = {"chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSE}


def ask(client: Any, path: str, **options: Any) -> Any:
    """The answer to a request that is served."""
    response = client.post(f"/v1/{path}", json=PATHS[path] | options)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    (choice,) = answer["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def refusal(client: Any, path: str, body: Any, status: int = 400) -> str:
    """Why a request is refused: with the same status and words whether it is to be streamed or not."""
    reasons = set()
    for stream in (False, True):
        content = json.dumps(body | {"stream": stream})
        response = client.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        reasons.add(response.json()["error"]["message"])
    (reason,) = reasons
    return reason


def calls_in(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """
    Name and arguments of the calls in a message, or in the deltas of a stream: the first of a call has its id, its
    name and no arguments, further ones have arguments alone.
    """
    calls: dict[int, list[str]] = {}
    for part in parts:
        for number, call in enumerate(part.get("tool_calls") or ()):
            function, index = call["function"], call.get("index", number)
            if "name" in function:
                assert index == len(calls) and call["id"].endswith(f"_{index}") and call["type"] == "function"
                assert "index" not in call or function["arguments"] == ""
                calls[index] = [function["name"], function["arguments"]]
            else:
                assert set(call) == {"index", "function"} and set(function) == {"arguments"}
                calls[index][1] += function["arguments"]
    return [(name, arguments) for name, arguments in calls.values()]
