"""Who has blocks when there are too few for all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, steps_to_the_end, text_alone
from support.models import tiny_model

from hf_specdec import NgramDraft, TokenTree
from hf_specdec.batching import Limits


def test_waiting_requests_hold_no_blocks() -> None:
    """One step preempts a request that it has still to make room for; given blocks then, it would stop everybody."""
    model = tiny_model()
    manager = model.init_continuous_batching(
        assistant_model=NgramDraft(),
        tree="[(0,)]",
        continuous_batching_config=Limits(block_size=2, num_blocks=13, chunk_size=1000),
    )
    asked = [(8, 18), (2, 20), (6, 14), (1, 16)]
    prompts = [list(range(1, length + 1)) for length, _ in asked]
    names = [
        manager.add_request(prompt, max_new_tokens=count, do_sample=False, speculate=False)
        for prompt, (_, count) in zip(prompts, asked, strict=True)
    ]
    manager.start()
    end = time.monotonic() + 20
    while manager.state.num_running + manager.state.num_waiting > 0 and time.monotonic() < end:
        time.sleep(0.01)
    held = [request.request_id for request in manager.engine.scheduler.waiting if request.table.blocks]
    manager.stop(hard_stop=True)
    assert not held
    for name, prompt, (_, count) in zip(names, prompts, asked, strict=True):
        assert manager.get_result(name).generated_tokens == text_alone(model, prompt, max_new_tokens=count)
    assert manager.state.num_preemptions > 0
    assert_nothing_left(manager)


def test_trees_keep_nobody_waiting() -> None:
    """Blocks that a request has for its tree are there for those who wait, whose texts need them."""
    model, draft = tiny_model(dtype=torch.float32), tiny_model(seed=1, dtype=torch.float32)
    manager = model.init_continuous_batching(
        assistant_model=draft,
        tree=TokenTree.chain(40),
        continuous_batching_config=Limits(block_size=4, num_blocks=20, chunk_size=64),
    )
    engine, prompts, waited = manager.engine, [[4] * 8, [5] * 28], 0
    first, second = (
        manager._admission.request(str(number), prompt, {"max_new_tokens": count, "do_sample": False})
        for number, (prompt, count) in enumerate(zip(prompts, (30, 4), strict=True))
    )
    with engine.running():
        engine.scheduler.add(first)
        for _ in range(2):
            list(engine.step())
        assert len(first.table.blocks) > engine.pool.blocks_for(first.length) and engine.pool.num_free < 8
        engine.scheduler.add(second)
        for _ in steps_to_the_end(engine):
            waited += second in engine.scheduler.waiting
    assert waited == 0
    for request, prompt, count in zip((first, second), prompts, (30, 4), strict=True):
        assert request.tokens[len(prompt) :] == text_alone(model, prompt, max_new_tokens=count)
    assert_nothing_left(manager)


@pytest.mark.parametrize("priorities, order", [((0, 0, 0), "012"), ((2, 1, 1), "120"), ((1, 1, -1), "201")])
def test_priorities(priorities: tuple[int, ...], order: str) -> None:
    """The more urgent are admitted first, and keep their blocks although others are older. Texts are those alone."""
    model = tiny_model()
    manager = model.init_continuous_batching(
        assistant_model=NgramDraft(),
        tree="[(0,)]",
        continuous_batching_config=Limits(block_size=2, num_blocks=16, max_requests=2, chunk_size=1000),
    )
    engine, prompts, ended = manager.engine, [[4] * 6, [5] * 6, [6] * 6], ""
    options = {"max_new_tokens": 20, "do_sample": False}
    requests = [
        manager._admission.request(str(number), prompt, options, speculate=False, priority=priority)
        for number, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True))
    ]
    with engine.running():
        for request in requests:
            engine.scheduler.add(request)
        for over in steps_to_the_end(engine):
            ended += "".join(request.request_id for request in over)
    assert ended == order and engine.scheduler.num_preemptions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens[6:] == text_alone(model, prompt, max_new_tokens=20)
    assert_nothing_left(manager)


def test_an_urgent_request_takes_blocks_of_older_ones() -> None:
    """Only of those that are less urgent, which continue when it is over."""
    manager = tiny_model().init_continuous_batching(
        assistant_model=NgramDraft(),
        tree="[(0,)]",
        continuous_batching_config=Limits(block_size=2, num_blocks=16, chunk_size=1000),
    )
    engine, preempted = manager.engine, []
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": -1}
    ask = manager._admission.request
    old, young = ask("old", [4] * 6, options, priority=1), ask("young", [5] * 6, options)
    with engine.running():
        engine.scheduler.add(old)
        list(engine.step())
        engine.scheduler.add(young)
        for _ in steps_to_the_end(engine):
            preempted += list(engine.scheduler.waiting)
    assert old in preempted and young not in preempted
    assert_nothing_left(manager)


@pytest.mark.parametrize("priority", ["0", True, 1.0, None])
def test_wrong_priorities(priority: Any) -> None:
    manager = tiny_model().init_continuous_batching(assistant_model=NgramDraft(), tree="[(0,)]")
    with pytest.raises(TypeError, match="`priority` must be an integer"):
        manager.add_request([5], priority=priority)
