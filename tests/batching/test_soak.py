"""Thousands of requests that arrive, end and are cancelled at random: nothing lost, nothing twice, nothing left."""

from __future__ import annotations

import gc
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.engine.request import Request


LONGEST = 30


@pytest.mark.parametrize(
    "kind", ["draft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ngram", "head"))]
)
def test_a_hundred(kind: str) -> None:
    soak(kind, 100)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "ngram", "head"])
def test_five_thousand(kind: str) -> None:
    soak(kind, 5000)


def soak(kind: str, count: int) -> None:
    model, choice = tiny_model(), random.Random(0)
    draft: Any = {"draft": noisy_copy(model), "ngram": NgramDraft(), "head": tiny_head(model)}[kind]
    prompts = ragged_prompts()
    texts = [text_alone(model, prompt, max_new_tokens=LONGEST) for prompt in prompts]
    manager = model.init_continuous_batching(
        assistant_model=draft,
        speculative_config=SpeculativeConfig(tree="[(0,), (1,), (0, 0)]", disable_by_batch_size=6),
        continuous_batching_config=limits(40, max_requests_per_batch=8),
    )
    asked: dict[str, tuple[int, int]] = {}
    cancelled: set[str] = set()
    ends: Counter[str] = Counter()
    memory: list[int] = []

    def take(timeout: float) -> bool:
        result = manager.get_result(timeout=timeout)
        if result is None:
            return False
        number, length = asked[result.request_id]
        assert result.prompt_ids == prompts[number]
        expected = texts[number][:length]
        if not result.is_finished():
            assert result.generated_tokens == expected[: len(result.generated_tokens)]
            return True
        ends[result.request_id] += 1
        if result.request_id in cancelled and result.error is not None:
            assert result.error == "cancelled"
            assert result.generated_tokens == expected[: len(result.generated_tokens)]
        else:
            assert result.error is None and result.generated_tokens == expected
        return True

    step = manager.engine.step

    def checked_step() -> Iterator[Request]:
        yield from step()
        if any(request.table.blocks for request in manager.engine.scheduler.waiting):
            raise AssertionError("a request that waits holds blocks")

    manager.engine.step = checked_step
    with manager:
        for _ in range(count):
            number, length = choice.randrange(len(prompts)), choice.randint(1, LONGEST)
            streaming, speculate = choice.random() < 0.2, choice.random() < 0.9
            name = manager.add_request(
                prompts[number], max_new_tokens=length, do_sample=False, streaming=streaming, speculate=speculate
            )
            asked[name] = number, length
            if choice.random() < 0.2:
                name = choice.choice(list(asked)[-30:])
                cancelled.add(name)
                manager.cancel_request(name)
            while manager.state.num_waiting > 20:
                take(0.01)
            if choice.random() < 0.02:
                time.sleep(0.02)  # a lull
            if len(asked) % 250 == 0:
                memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        while sum(ends.values()) < count:
            assert take(60), "a request is lost"
        assert not take(0.1)
    assert manager.background_thread_status.fatal_error is None
    assert set(ends) == set(asked) and set(ends.values()) == {1}
    assert manager.state.num_preemptions > 0
    assert_nothing_left(manager)
    assert manager.get_result() is None
    gc.collect()
    assert not [held for held in gc.get_objects() if isinstance(held, Request)]
    assert not memory[4:] or memory[-1] < 1.02 * memory[4]  # in kilobytes: flat after the first thousand
