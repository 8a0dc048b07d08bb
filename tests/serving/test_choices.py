"""Requests for several texts: of several prompts, or several choices of each; and the usage of streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.tokenizer import tiny_tokenizer


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from hf_specdec.serving.choices import one_begun  # noqa: E402
from hf_specdec.serving.generation import asked_for  # noqa: E402


CHAT = {"messages": [{"role": "user", "content": "abc xyz"}], "max_tokens": 12, "temperature": 2.0}
COMPLETION = {"prompt": "abc xyz", "max_tokens": 12, "temperature": 2.0}
PATHS: dict[str, dict[str, Any]] = {"chat/completions": CHAT, "completions": COMPLETION}
PROMPTS = ["abc xyz", "q", "the cat sat"]


def ask(client: Any, path: str, **options: Any) -> dict[str, Any]:
    response = client.post(f"/v1/{path}", json=PATHS[path] | options)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def texts_of(answer: dict[str, Any]) -> list[str]:
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def chunks_of(client: Any, path: str, **options: Any) -> list[dict[str, Any]]:
    with client.stream("POST", f"/v1/{path}", json=PATHS[path] | options | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(chunks: list[dict[str, Any]]) -> list[str]:
    """The texts of a stream's choices."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    assert len({chunk["id"] for chunk in chunks}) == 1
    return [texts[number] for number in range(len(texts))]


@pytest.mark.parametrize("path", PATHS)
def test_choices_have_seeds_of_their_own(client: Any, path: str) -> None:
    """The texts are those of requests with the seeds that follow the given one, and so are those of a stream."""
    alone = [ask(client, path, seed=5 + number) for number in range(3)]
    expected = [texts_of(one)[0] for one in alone]
    together = ask(client, path, seed=5, n=3)
    assert texts_of(together) == expected and len(set(expected)) == 3
    usages = [one["usage"] for one in alone]
    new = sum(one["completion_tokens"] for one in usages)
    assert together["usage"]["prompt_tokens"] == usages[0]["prompt_tokens"]
    assert together["usage"]["completion_tokens"] == new
    chunks = chunks_of(client, path, seed=5, n=3)
    assert streamed(chunks) == expected and chunks[-1]["usage"] == together["usage"]
    assert not any(chunk.get("usage") for chunk in chunks[:-1])
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")]
    assert ends == ["length"] * 3
    assert len(texts_of(ask(client, path, n=2))) == 2  # without a seed


def test_prompts(client: Any) -> None:
    """Texts, or tokens: each prompt's choices after each other."""
    greedy = {"temperature": 0}
    alone = [ask(client, "completions", prompt=prompt, **greedy) for prompt in PROMPTS]
    expected = [texts_of(one)[0] for one in alone]
    tokens = [tiny_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    for prompts in (PROMPTS, tokens, [PROMPTS[0], *tokens[1:]]):
        answer = ask(client, "completions", prompt=prompts, **greedy)
        assert texts_of(answer) == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
        assert streamed(chunks_of(client, "completions", prompt=prompts, **greedy)) == expected
    assert texts_of(ask(client, "completions", prompt=tokens[1], best_of=1, **greedy)) == expected[1:2]
    twice = ask(client, "completions", prompt=PROMPTS, n=2, best_of=2, seed=3)
    ones = [texts_of(ask(client, "completions", prompt=one, seed=seed))[0] for one in PROMPTS for seed in (3, 4)]
    assert texts_of(twice) == ones and twice["usage"]["prompt_tokens"] == sum(map(len, tokens))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", [1, 2])
def test_usage_of_streams(client: Any, path: str, number: int) -> None:
    """In a chunk without choices, in none, or, as in `transformers serve`, in the last one."""
    ask(client, path, n=number, seed=1)  # from now on the prompt is in the prefix cache
    wanted = ask(client, path, n=number, seed=1)["usage"]
    for include, place in ((True, -1), (False, None), (None, -1)):
        chunks = chunks_of(client, path, n=number, seed=1, stream_options={"include_usage": include})
        found = [chunk.get("usage") for chunk in chunks]
        assert [one for one in found if one] == ([] if place is None else [wanted])
        assert place is None or found[place] == wanted
        assert bool(chunks[-1]["choices"]) == (include is not True)
        assert streamed(chunks) == texts_of(ask(client, path, n=number, seed=1))


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_is_refused_is_refused_with_all(client: Any, stream: bool) -> None:
    """The fixture asserts that nothing is left open."""
    for prompt, reason in (
        (["abc", "x" * 900], "does not fit"),
        (["abc", ""], "no tokens"),
        ([[5], [6] * 900], "fit"),
    ):
        body = COMPLETION | {"prompt": prompt, "n": 2, "max_tokens": 500, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_log_probabilities_of_choices(client: Any, path: str) -> None:
    """Those of each alone; a token that ends the text and is no part of it has none."""
    end = tiny_tokenizer()("q")["input_ids"]
    options: dict[str, Any] = {"stop_token_ids": end, "min_tokens": 5, "logit_bias": {str(end[0]): 100}}
    options |= {"logprobs": True, "top_logprobs": 0} if path.startswith("chat") else {"logprobs": 0}
    alone = [ask(client, path, seed=5 + number, **options)["choices"][0]["logprobs"] for number in range(2)]
    together = ask(client, path, seed=5, n=2, **options)["choices"]
    assert [choice["logprobs"] for choice in together] == alone
    tokens = [one["content"] if "content" in one else one["tokens"] for one in alone]
    assert [len(one) for one in tokens] == [5, 5]
    chunks = chunks_of(client, path, seed=5, n=2, **options)
    assert streamed(chunks) == texts_of({"choices": together})


class Waiting:
    """A request to the engine that has a token, or fails, when it is told to."""

    def __init__(self) -> None:
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False

    async def admitted(self) -> None: ...

    async def begun(self) -> None:
        await self.first

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize("error", [None, ValueError("no token")])
def test_streams_begin_with_the_first_token_of_any_text(error: Exception | None) -> None:
    """Other texts may wait until the first one has ended."""

    async def begin() -> None:
        requests: Any = [Waiting() for _ in range(3)]
        asked_for.set(requests)
        begun = asyncio.ensure_future(one_begun(requests))
        await asyncio.sleep(0)
        assert not begun.done()
        if error is None:
            requests[1].first.set_result(None)
            await asyncio.wait_for(begun, 3)
        else:
            requests[1].first.set_exception(error)
            with pytest.raises(ValueError, match="no token"):
                await asyncio.wait_for(begun, 3)
        assert [one.is_cancelled for one in requests] == [error is not None] * 3

    asyncio.run(begin())
