"""Requests of one manager: cancelled, stopped, waiting for a place, and from many threads."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from typing import Any

import pytest
from support.batches import REQUEST_TREE, assert_nothing_left, limits, manager_of, ragged_prompts, text_alone
from transformers import (
    PreTrainedModel,
)
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_specdec.batching import SpeculativeBatchingManager


PROMPTS = ragged_prompts((9, 14, 5, 21))


def test_cancelling(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """While running, while being read, while waiting, before the start, and when there is nothing to cancel."""
    manager = manager_of(target, draft, continuous_batching_config=limits(60, max_requests_per_batch=2))
    prompts = ragged_prompts((5, 60, 9, 11, 7))
    names = manager.add_requests(prompts, max_new_tokens=120, do_sample=False)
    manager.cancel_request(names[4])
    manager.cancel_request("nobody")
    with manager:
        assert manager.get_result(names[4]).error == "cancelled"
        manager.cancel_request(names[2])
        result = manager.get_result(names[2])
        assert (result.error, result.status) == ("cancelled", RequestStatus.FAILED)
        manager.cancel_request(names[0])
        manager.cancel_request(names[1])
        for number in (0, 1):
            result = manager.get_result(names[number])
            alone = text_alone(target, prompts[number], max_new_tokens=120)
            assert result.error in ("cancelled", None)
            assert result.generated_tokens == alone[: len(result.generated_tokens)]
        assert manager.get_result(names[3]).generated_tokens == text_alone(target, prompts[3], max_new_tokens=120)
        manager.cancel_request(names[3])
    assert_nothing_left(manager)


def test_ctrl_c(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Ends the requests and the thread, and leaves the model as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            target.generate_batch(
                PROMPTS, assistant_model=draft, tree=REQUEST_TREE, max_new_tokens=50_000, do_sample=False
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "hf-specdec-manager"]
    assert target.config._attn_implementation == "sdpa"


def test_stopping_at_once(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    manager = manager_of(target, draft)
    manager.start()
    names = manager.add_requests(PROMPTS, max_new_tokens=400, do_sample=False)
    manager.stop(hard_stop=True)
    assert not manager.is_running()
    assert all("was stopped before" in manager.get_result(name).error for name in names)
    assert manager.get_result() is None
    assert_nothing_left(manager)
    with manager:  # and can be used again
        name = manager.add_request(PROMPTS[0], max_new_tokens=8, do_sample=False)
        assert manager.get_result(name).generated_tokens == text_alone(target, PROMPTS[0], max_new_tokens=8)
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "places, options", [(2, {"max_requests_per_batch": 2}), (4, {"num_blocks": 8})], ids=["places", "blocks"]
)
def test_a_full_queue(target: PreTrainedModel, draft: PreTrainedModel, places: int, options: dict[str, int]) -> None:
    """Those wait for which there is no place, or are no blocks."""
    manager = manager_of(target, draft, continuous_batching_config=limits(max_queue_size=3, **options))
    for _ in range(places + 3):
        manager.add_request([4, 5, 6], max_new_tokens=5)
    with pytest.raises(queue.Full, match="`max_queue_size=3`: 3 requests are waiting, and 1 would come"):
        manager.add_request([4, 5, 6], max_new_tokens=5)
    manager.start()
    manager.stop()
    assert_nothing_left(manager)


def test_several_at_once_and_the_queue(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    config = limits(max_queue_size=3, max_requests_per_batch=2)
    manager = manager_of(target, draft, continuous_batching_config=config)
    with pytest.raises(queue.Full, match="0 requests are waiting, and 6 would come"):
        manager.add_requests([[4, 5, 6]] * 6, max_new_tokens=5)
    assert len(manager.add_requests([[4, 5, 6]] * 5, max_new_tokens=5)) == 5
    manager.destroy()


def test_a_burst_finds_the_places_that_are_free(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    with manager_of(target, draft, continuous_batching_config=limits(max_queue_size=1)) as manager:
        for name in [manager.add_request([4, 5, 6], max_new_tokens=5) for _ in range(30)]:
            assert manager.get_result(name).error is None


@pytest.mark.slow
def test_generate_meanwhile(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    """Others may use the model while requests run."""
    expected = text_alone(target, PROMPTS[3], max_new_tokens=20)
    names = manager.add_requests(PROMPTS * 4, max_new_tokens=60, do_sample=False)
    assert all(text_alone(target, PROMPTS[3], anew=True, max_new_tokens=20) == expected for _ in range(4))
    texts = [text_alone(target, prompt, anew=True, max_new_tokens=60) for prompt in PROMPTS]
    for name, text in zip(names, texts * 4, strict=True):
        assert manager.get_result(name).generated_tokens == text


def test_requests_from_many_threads(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    expected = {number: text_alone(target, prompt, max_new_tokens=15) for number, prompt in enumerate(PROMPTS)}
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(6):
            name = manager.add_request(PROMPTS[number % 4], max_new_tokens=15, do_sample=False)
            if turn % 3 == 2:
                time.sleep(0.01)
            result = manager.get_result(name, timeout=60)
            if result is None or result.generated_tokens != expected[number % 4]:
                wrong.append((name, result))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_first_token_is_told_before_the_others_go_on(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """From the forward that ends a prompt, and not from the next."""
    manager = target.init_continuous_batching(
        assistant_model=draft, tree="[(0,)]", continuous_batching_config=limits(max_batch_tokens=8)
    )
    forwards: list[int] = []
    handle = target.register_forward_hook(lambda module, args, output: forwards.append(output.logits.shape[1]))
    try:
        for prompt in (PROMPTS[0][:8], PROMPTS[0][:3]):  # the second is read beside the first, which runs
            manager.add_request(prompt, max_new_tokens=20, do_sample=False)
        manager._loop._requests.take_in()
        seen = []
        with manager.engine.running():
            for _ in range(2):
                seen += [
                    (request.request_id, request.length - len(request.prompt), len(forwards))
                    for requests in manager.engine.step()
                    for request in requests
                ]
    finally:
        handle.remove()
    first, second = "req_0", "req_1"
    assert seen[0] == (first, 1, 1)  # alone in the first forward
    assert [event[0] for event in seen] == [first, first, second, first, second]
    assert seen[2] == (second, 1, 3) and seen[3][2] == 4
    assert len(forwards) == 4
