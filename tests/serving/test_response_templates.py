"""Answers that transformers' server parses from tokens, by the model's response template: stop strings leave them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
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

from hf_specdec.serving.generation import SpeculativeState  # noqa: E402
from hf_specdec.serving.handlers import Chats, Responses  # noqa: E402
from hf_specdec.serving.one_model import OneModel  # noqa: E402


PROMPT = "abc xyz"
FIELD = "reasoning_content" if version.parse(transformers.__version__) >= version.parse("5.23") else "thinking"


@dataclass
class Handlers:
    """The handlers whose answers are parsed."""

    chat: Chats
    responses: Responses


@pytest.fixture(scope="module")
def handlers() -> Iterator[Handlers]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    options: dict[str, Any] = {"tree": "[(0,)]", "continuous_batching_config": limits()}
    with (
        tiny_model().init_continuous_batching(assistant_model=NgramDraft(), **options) as manager,
        engine_over(manager, tokenizer) as engine,
    ):
        both = OneModel("tiny", engine.model, tokenizer), SpeculativeState(engine)
        yield Handlers(Chats(*both), Responses(*both))


@pytest.fixture(scope="module")
def whole(handlers: Handlers) -> str:
    """What the model says. From now on its beginning opens its reasoning, and something in the middle ends it."""
    tokenizer = handlers.chat.model_manager.load_model_and_processor()[1]
    text = message(handlers.chat, None, streams=False)[1]
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


def message(handler: Chats | Responses, stop: str | None, streams: bool) -> tuple[str, str]:
    """The reasoning and the content of an answer."""
    return (_of_chat if isinstance(handler, Chats) else _of_responses)(answers(handler, stop, streams))


def answers(handler: Chats | Responses, stop: str | None, streams: bool, **options: Any) -> list[dict[str, Any]]:
    """What is answered, at once or in events."""
    config: dict[str, Any] = {"max_new_tokens": 60, "do_sample": True, "suppress_tokens": [0, 1, 2, 3]}
    config |= {} if stop is None else {"stop_strings": [stop]}
    body = {"model": "tiny", "generation_config": json.dumps(config), "seed": 3, "stream": streams} | options
    is_chat = isinstance(handler, Chats)
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"input": PROMPT}

    async def ask() -> list[dict[str, Any]]:
        response = await handler.handle_request(body, "name")
        if not streams:
            return [json.loads(response.body)]
        lines = "".join([chunk async for chunk in response.body_iterator]).splitlines()
        return [json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: {")]

    return asyncio.run(ask())


def _of_chat(answers: list[dict[str, Any]]) -> tuple[str, str]:
    choices = [answer["choices"][0] for answer in answers]
    parts = [choice.get("message") or choice["delta"] for choice in choices]
    return tuple("".join(part.get(name) or "" for part in parts) for name in ("reasoning_content", "content"))


def _of_responses(answers: list[dict[str, Any]]) -> tuple[str, str]:
    items = answers[-1].get("response", answers[-1])["output"]
    texts = {item["type"]: item["content"][0]["text"] for item in items}
    return texts.get("reasoning", ""), texts["message"]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("part", ["reasoning", "content"])
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_stop_strings_leave_them(handlers: Handlers, whole: str, kind: str, part: str, streams: bool) -> None:
    handler = getattr(handlers, kind)
    reasoning, content = message(handler, None, streams)
    assert len(reasoning) > 20 and len(content) > 20 and whole.endswith(content)
    text = reasoning if part == "reasoning" else content
    at = next(at for at in range(8, len(text) - 4) if whole.count(text[at : at + 3]) == 1)
    stopped = message(handler, text[at : at + 3], streams)
    assert stopped == ((reasoning[:at], "") if part == "reasoning" else (reasoning, content[:at]))


def logprobs_of(handler: Chats | Responses, stop: str | None, streams: bool) -> list[dict[str, Any]]:
    """The tokens of an answer, with their log-probabilities."""
    if isinstance(handler, Chats):
        found = [one["choices"][0].get("logprobs") for one in answers(handler, stop, streams, logprobs=True)]
        return [token for one in found if one for token in one["content"]]
    events = answers(handler, stop, streams, include=["message.output_text.logprobs"])
    output = events[-1].get("response", events[-1])["output"]
    (told,) = (item["content"][0]["logprobs"] for item in output if item["type"] == "message")
    deltas = [one["logprobs"] for one in events if one.get("type") == "response.output_text.delta"]
    if deltas:  # none where reasoning is all
        assert [token for one in deltas for token in one] == told
    return told


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_tokens_of_all_parts_have_log_probabilities(handlers: Handlers, whole: str, kind: str) -> None:
    """Delimiters are tokens, too; what follows a stop string is none."""
    handler, stop = getattr(handlers, kind), whole[-4:-1]
    for stop_string, text in ((None, whole), (stop, whole[: whole.index(stop)])):
        told = [logprobs_of(handler, stop_string, streams) for streams in (False, True)]
        assert told[0] == told[1] and all(one["logprob"] < 0 for one in told[0])
        joined = "".join(one["token"] for one in told[0])
        assert joined.startswith(text) and joined.rstrip(told[0][-1]["token"]) in text


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_text_of_a_grammar_is_content(
    handlers: Handlers, whole: str, kind: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the prompt begins reasoning, as templates of models that think do."""
    pytest.importorskip("llguidance")
    handler = getattr(handlers, kind)
    tokenizer = handler.model_manager.load_model_and_processor()[1]
    fields = {FIELD: {"open": "xyz", "close": ".", "content": "text"}, "content": {"content": "text"}}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "abc", "fields": fields}
    monkeypatch.setattr(tokenizer, "response_template", template)
    assert message(handler, None, streams)[0]
    parts = _of_chat if kind == "chat" else _of_responses
    reasoning, content = parts(answers(handler, None, streams, structured_outputs={"regex": "([ac]xyz[.]b)+"}))
    assert not reasoning and re.match("([ac]xyz[.]b){9}", content)
