"""Who has blocks when there are too few for all."""

from __future__ import annotations

import time

from support.batches import assert_nothing_left, text_alone
from support.models import tiny_model

from hf_specdec import NgramDraft
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
