"""What stands between a handler of the server and the manager, without HTTP and in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.batches import assert_nothing_left, limits, text_alone
from support.models import tiny_model
from support.servers import engine_over
from support.tokenizer import tiny_tokenizer
from transformers import GenerationConfig


pytest.importorskip("fastapi")

from hf_specdec import NgramDraft  # noqa: E402
from hf_specdec.batching import SpeculativeBatchingManager  # noqa: E402
from hf_specdec.serving import generation  # noqa: E402
from hf_specdec.serving.disconnects import CancelOnDisconnect  # noqa: E402
from hf_specdec.serving.engine.client import EngineClient  # noqa: E402
from hf_specdec.serving.errors import RequestRefused  # noqa: E402
from hf_specdec.serving.generation import Generation, asked_for  # noqa: E402


@dataclass
class Both:
    """The manager and its client."""

    manager: SpeculativeBatchingManager
    engine: EngineClient


@pytest.fixture
def both() -> Iterator[Both]:
    options: dict[str, Any] = {"tree": "[(0,)]", "continuous_batching_config": limits()}
    target = tiny_model(max_position_embeddings=2**21)
    with target.init_continuous_batching(assistant_model=NgramDraft(), **options) as manager:
        with engine_over(manager, tiny_tokenizer()) as engine:
            yield Both(manager, engine)
            assert not engine._open and not engine._open._handlers
    assert_nothing_left(manager)


def config_of(length: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=length, do_sample=False)


async def answer(engine: EngineClient, prompt: list[int], length: int, name: str) -> list[int]:
    inputs, tokenizer = {"input_ids": prompt}, tiny_tokenizer()
    call = engine.model, tokenizer, inputs, config_of(length), name
    _, _, tokens = await Generation(engine).generate_non_streaming(*call)
    return tokens


async def stream(engine: EngineClient, prompt: list[int], length: int, name: str) -> int:
    inputs, tokenizer = {"input_ids": prompt}, tiny_tokenizer()
    texts, streamer = Generation(engine).generate_streaming(engine.model, tokenizer, inputs, config_of(length), name)
    while await texts.get() is not None:
        pass
    return streamer.total_tokens


def test_clients_may_give_the_same_id(both: Both) -> None:
    asked = [([5, 6, 7], 120), ([9, 8], 5), ([4], 30)]

    async def ask() -> Any:
        alike = [answer(both.engine, prompt, length, "same") for prompt, length in asked]
        alike += [stream(both.engine, prompt, length, "same") for prompt, length in asked]
        return await asyncio.wait_for(asyncio.gather(*alike), timeout=60)

    *texts, first, second, third = asyncio.run(ask())
    assert texts == [text_alone(both.manager.model, prompt, max_new_tokens=length) for prompt, length in asked]
    assert [first, second, third] == [len(text) for text in texts]


@pytest.fixture
def unchecked_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are left to the engine to be refused."""
    monkeypatch.setattr(generation, "check_length", lambda *_: None)


def test_a_refused_request_leaves_no_handler(both: Both, unchecked_lengths: None) -> None:
    for number in range(3):
        with pytest.raises(ValueError, match="never fit"):
            asyncio.run(answer(both.engine, [5, 6, 7], 10**6, f"request-{number}"))


def test_texts_stay_within_the_context() -> None:
    """Of 256 tokens: without a length they end there, and longer ones are refused, though there is memory."""
    options: dict[str, Any] = {"tree": "[(0,)]", "continuous_batching_config": limits()}
    inputs, tokenizer = {"input_ids": [5, 6, 7]}, tiny_tokenizer()

    async def length_of(engine: EngineClient, **config: Any) -> int:
        asked = GenerationConfig(eos_token_id=-1, do_sample=False, **config)
        _, length, tokens = await Generation(engine).generate_non_streaming(
            engine.model, tokenizer, inputs, asked, "one"
        )
        return length + len(tokens)

    with tiny_model().init_continuous_batching(assistant_model=NgramDraft(), **options) as manager:
        assert manager.most_tokens > 256
        with engine_over(manager, tokenizer) as engine:
            for config in ({}, {"max_new_tokens": 253}, {"max_length": 256}):
                assert asyncio.run(length_of(engine, **config)) == 256
            for name, value in (("max_new_tokens", 253), ("max_length", 256)):
                told = f"`generation_config.{name}={value + 1}` .*context of 256. Ask for {value} at most"
                with pytest.raises(RequestRefused, match=told):
                    asyncio.run(length_of(engine, **{name: value + 1}))
            inputs["input_ids"] = [5] * 256
            with pytest.raises(RequestRefused, match="prompt has 256 tokens, .* the model's context of 256"):
                asyncio.run(length_of(engine))


async def until_the_client_leaves(work: Callable[[], Awaitable[Any]], leaves: asyncio.Event) -> None:
    """Does something on behalf of a connection."""

    async def app(*_: Any) -> None:
        await work()

    async def receive() -> dict[str, str]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    await CancelOnDisconnect(app)({"type": "http", "path": "/v1/completions"}, receive, None)


@pytest.mark.parametrize("when", ["before its answer", "before its stream", "within its stream"])
def test_what_a_client_that_leaves_has_asked_for_is_ended(both: Both, when: str) -> None:
    async def leave() -> None:
        leaves, has_begun = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            inputs, config = {"input_ids": [5, 6, 7]}, config_of(700)
            if when == "before its answer":
                has_begun.set()
                await answer(both.engine, [5, 6, 7], 700, "gone")
            call = both.engine.model, tiny_tokenizer(), inputs, config, "gone"
            texts, _ = Generation(both.engine).generate_streaming(*call)
            for request in asked_for.get():
                await request.admitted()
            if when == "within its stream":
                await texts.get()
            has_begun.set()
            await asyncio.sleep(60)

        serving = asyncio.ensure_future(until_the_client_leaves(work, leaves))
        await has_begun.wait()
        await asyncio.sleep(0.05)
        leaves.set()
        await serving
        while both.engine._open:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert 0 < both.manager.state.num_generation_tokens < 700


@pytest.mark.parametrize("length", [700, 10**6], ids=["taken", "refused"])
def test_a_request_cancelled_before_its_first_token(
    both: Both, length: int, unchecked_lengths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request, may_go_on = both.manager.add_request, threading.Event()

    def slow(*args: Any, **options: Any) -> str:
        assert may_go_on.wait(30)
        return add_request(*args, **options)

    monkeypatch.setattr(both.manager, "add_request", slow)

    async def leave() -> None:
        leaves = asyncio.Event()
        serving = asyncio.ensure_future(
            until_the_client_leaves(lambda: answer(both.engine, [5, 6, 7], length, "gone"), leaves)
        )
        await asyncio.sleep(0.1)
        leaves.set()
        await serving
        may_go_on.set()
        while both.engine._open:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert both.manager.state.num_generation_tokens < 700
