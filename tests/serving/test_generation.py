"""What stands between a handler of the server and the manager, without HTTP and in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
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
from hf_specdec.serving.engine import EngineClient  # noqa: E402
from hf_specdec.serving.generation import Generation, OneRequest  # noqa: E402


@dataclass
class Both:
    """The manager and its client."""

    manager: SpeculativeBatchingManager
    engine: EngineClient


@pytest.fixture
def both() -> Iterator[Both]:
    options: dict[str, Any] = {"tree": "[(0,)]", "continuous_batching_config": limits()}
    with tiny_model().init_continuous_batching(assistant_model=NgramDraft(), **options) as manager:
        with engine_over(manager, tiny_tokenizer()) as engine:
            yield Both(manager, engine)
            assert not engine._open and not engine._handlers
    assert_nothing_left(manager)


def config_of(length: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=length, do_sample=False)


async def answer(engine: EngineClient, prompt: list[int], length: int, name: str) -> list[int]:
    inputs, tokenizer = {"input_ids": prompt}, tiny_tokenizer()
    generation = Generation(engine)
    _, _, tokens = await generation.generate_non_streaming(engine.model, tokenizer, inputs, config_of(length), name)
    return tokens


async def stream(engine: EngineClient, prompt: list[int], length: int, name: str) -> int:
    inputs, tokenizer = {"input_ids": prompt}, tiny_tokenizer()
    texts, streamer = Generation(engine).generate_streaming(engine.model, tokenizer, inputs, config_of(length), name)
    while await texts.get() is not None:
        pass
    return streamer.total_tokens


async def until_idle(manager: SpeculativeBatchingManager) -> None:
    for _ in range(200):
        if manager.state.num_running + manager.state.num_waiting == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it still runs")


def test_clients_may_give_the_same_id(both: Both) -> None:
    asked = [([5, 6, 7], 120), ([9, 8], 5), ([4], 30)]

    async def ask() -> Any:
        alike = [answer(both.engine, prompt, length, "same") for prompt, length in asked]
        alike += [stream(both.engine, prompt, length, "same") for prompt, length in asked]
        return await asyncio.wait_for(asyncio.gather(*alike), timeout=60)

    *texts, first, second, third = asyncio.run(ask())
    assert texts == [text_alone(both.manager.model, prompt, max_new_tokens=length) for prompt, length in asked]
    assert [first, second, third] == [len(text) for text in texts]


def test_a_refused_request_leaves_no_handler(both: Both) -> None:
    for number in range(3):
        with pytest.raises(ValueError, match="never fit"):
            asyncio.run(answer(both.engine, [5, 6, 7], 10**6, f"request-{number}"))


def test_a_cancelled_one_is_ended(both: Both) -> None:
    async def leave() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answer(both.engine, [5, 6, 7], 700, "gone"), timeout=0.05)
        await until_idle(both.manager)
        assert both.engine.state.num_running == 0
        await asyncio.sleep(0.1)  # its last result

    asyncio.run(leave())
    assert both.manager.state.num_generation_tokens < 700


def test_one_that_is_cancelled_before_it_is_taken(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a client that leaves before its stream begins."""
    add_request, may_go_on = both.manager.add_request, threading.Event()

    def slow(*args: Any, **options: Any) -> str:
        assert may_go_on.wait(30)
        return add_request(*args, **options)

    monkeypatch.setattr(both.manager, "add_request", slow)

    async def leave() -> None:
        request = OneRequest(both.engine, config_of(700), "gone")
        request.add_request([5, 6, 7], request.request_id, streaming=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request.admitted(), timeout=0.1)
        may_go_on.set()
        while both.engine._open:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert both.manager.state.num_generation_tokens < 700
