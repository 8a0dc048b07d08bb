"""What stands between a handler of the server and the manager, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.batches import assert_nothing_left, limits, text_alone
from support.models import tiny_model
from support.tokenizer import tiny_tokenizer
from transformers import GenerationConfig


pytest.importorskip("fastapi")

from hf_specdec import NgramDraft  # noqa: E402
from hf_specdec.batching import SpeculativeBatchingManager  # noqa: E402
from hf_specdec.serving.generation import Generation  # noqa: E402


@pytest.fixture
def manager() -> Iterator[SpeculativeBatchingManager]:
    options: dict[str, Any] = {"tree": "[(0,)]", "continuous_batching_config": limits()}
    with tiny_model().init_continuous_batching(assistant_model=NgramDraft(), **options) as manager:
        yield manager
    assert_nothing_left(manager)
    assert not manager._loop.results._handlers


async def answer(manager: SpeculativeBatchingManager, prompt: list[int], length: int, name: str) -> list[int]:
    config = GenerationConfig(max_new_tokens=length, do_sample=False)
    inputs, tokenizer = {"input_ids": prompt}, tiny_tokenizer()
    _, _, tokens = await Generation(manager).generate_non_streaming(manager.model, tokenizer, inputs, config, name)
    return tokens


async def stream(manager: SpeculativeBatchingManager, prompt: list[int], length: int, name: str) -> int:
    config = GenerationConfig(max_new_tokens=length, do_sample=False)
    inputs, tokenizer = {"input_ids": prompt}, tiny_tokenizer()
    texts, streamer = Generation(manager).generate_streaming(manager.model, tokenizer, inputs, config, name)
    while await texts.get() is not None:
        pass
    return streamer.total_tokens


def test_clients_may_give_the_same_id(manager: SpeculativeBatchingManager) -> None:
    asked = [([5, 6, 7], 120), ([9, 8], 5), ([4], 30)]

    async def ask() -> Any:
        alike = [answer(manager, prompt, length, "same") for prompt, length in asked]
        alike += [stream(manager, prompt, length, "same") for prompt, length in asked]
        return await asyncio.wait_for(asyncio.gather(*alike), timeout=60)

    *texts, first, second, third = asyncio.run(ask())
    assert texts == [text_alone(manager.model, prompt, max_new_tokens=length) for prompt, length in asked]
    assert [first, second, third] == [len(text) for text in texts]


def test_a_refused_request_leaves_no_handler(manager: SpeculativeBatchingManager) -> None:
    for number in range(3):
        with pytest.raises(ValueError, match="never fit"):
            asyncio.run(answer(manager, [5, 6, 7], 10**6, f"request-{number}"))


def test_a_cancelled_one_is_ended(manager: SpeculativeBatchingManager) -> None:
    async def leave() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answer(manager, [5, 6, 7], 700, "gone"), timeout=0.05)
        for _ in range(200):
            if manager.state.num_running + manager.state.num_waiting == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it still runs")

    asyncio.run(leave())
    assert manager.state.num_generation_tokens < 700
