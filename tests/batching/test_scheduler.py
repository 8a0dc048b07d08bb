"""Who has blocks when there are too few for all."""

from __future__ import annotations

import time

import torch
from support.batches import assert_nothing_left, text_alone
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
        while engine.scheduler.has_work:
            for told in engine.step():
                for request in told:
                    if request.is_over:
                        engine.end(request)
            waited += second in engine.scheduler.waiting
    assert waited == 0
    for request, prompt, count in zip((first, second), prompts, (30, 4), strict=True):
        assert request.tokens[len(prompt) :] == text_alone(model, prompt, max_new_tokens=count)
    assert_nothing_left(manager)
