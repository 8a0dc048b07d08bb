"""Answers that transformers' server parses from tokens, by the model's response template: stop strings leave them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from packaging import version
from support.batches import limits
from support.models import tiny_model
from support.servers import engine_over
from support.tokenizer import tiny_tokenizer

from hf_specdec import NgramDraft


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from hf_specdec.serving.app import OneModel, _Chat  # noqa: E402
from hf_specdec.serving.generation import SpeculativeState  # noqa: E402


PROMPT = "abc xyz"
FIELD = "reasoning_content" if version.parse(transformers.__version__) >= version.parse("5.23") else "thinking"


@pytest.fixture(scope="module")
def chat() -> Iterator[_Chat]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    options: dict[str, Any] = {"tree": "[(0,)]", "continuous_batching_config": limits()}
    with (
        tiny_model().init_continuous_batching(assistant_model=NgramDraft(), **options) as manager,
        engine_over(manager, tokenizer) as engine,
    ):
        yield _Chat(OneModel("tiny", engine.model, tokenizer), SpeculativeState(engine))


@pytest.fixture(scope="module")
def whole(chat: _Chat) -> str:
    """What the model says. From now on its beginning opens its reasoning, and something in the middle ends it."""
    tokenizer = chat.model_manager.load_model_and_processor()[1]
    text = message(chat, None, streams=False)[1]
    opens = next(text[:length] for length in range(1, len(text)) if text.count(text[:length]) == 1)
    closes = next(text[at : at + 3] for at in range(len(text) // 2, len(text)) if text.count(text[at : at + 3]) == 1)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": PROMPT,
        "fields": {
            FIELD: {"open": opens, "close": closes, "content": "text"},
            "content": {"content": "text"},
        },
    }
    return text


def message(chat: _Chat, stop: str | None, streams: bool) -> tuple[str, str]:
    """The reasoning and the content of an answer."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60}
    body |= {"temperature": 1.0, "seed": 3, "stream": streams, "logit_bias": dict.fromkeys("0123", -100.0)}
    body |= {} if stop is None else {"stop": stop}

    async def ask() -> list[dict[str, Any]]:
        response = await chat.handle_request(body, "name")
        if not streams:
            return [json.loads(response.body)["choices"][0]["message"]]
        chunks = [chunk async for chunk in response.body_iterator]
        events = [
            line[len("data: ") :] for chunk in chunks for line in chunk.splitlines() if line.startswith("data: ")
        ]
        return [json.loads(event)["choices"][0]["delta"] for event in events if event != "[DONE]"]

    parts = asyncio.run(ask())
    return tuple("".join(part.get(name) or "" for part in parts) for name in ("reasoning_content", "content"))


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("part", ["reasoning", "content"])
def test_stop_strings_leave_them(chat: _Chat, whole: str, part: str, streams: bool) -> None:
    reasoning, content = message(chat, None, streams)
    assert len(reasoning) > 20 and len(content) > 20 and whole.endswith(content)
    text = reasoning if part == "reasoning" else content
    at = next(at for at in range(8, len(text) - 4) if whole.count(text[at : at + 3]) == 1)
    stopped = message(chat, text[at : at + 3], streams)
    assert stopped == ((reasoning[:at], "") if part == "reasoning" else (reasoning, content[:at]))
