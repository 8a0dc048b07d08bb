"""Results of requests: as they come, in order, to whoever asks for them."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any, cast

from support.batches import assert_nothing_left, manager_of, ragged_prompts, text_alone
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_specdec import NgramDraft
from hf_specdec.batching import SpeculativeBatchingManager, SpeculativeGenerationOutput
from hf_specdec.batching.results import Results


PROMPTS = ragged_prompts((9, 14, 5, 21))


def test_streaming_is_in_order(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    first = manager.add_request(PROMPTS[0], max_new_tokens=20, do_sample=False, streaming=True, record_timestamps=True)
    second = manager.add_request(PROMPTS[1], max_new_tokens=20, do_sample=False)
    texts = [result.generated_tokens for result in manager.request_id_iter(first)]
    expected = text_alone(target, PROMPTS[0], max_new_tokens=20)
    assert texts[-1] == expected and len(texts) > 3
    assert all(expected[: len(text)] == text and len(text) < len(after) for text, after in pairwise(texts))
    result = manager.get_result(second)
    assert result.status == RequestStatus.FINISHED and result.is_finished() and result.timestamps is None
    assert 0 < result.created_time <= result.lifespan[0] <= result.lifespan[1]


def test_results_do_not_change(manager: SpeculativeBatchingManager) -> None:
    """The counts of one are those of its own tokens, whatever comes later."""
    name = manager.add_request(PROMPTS[0], max_new_tokens=30, do_sample=False, eos_token_id=-1, streaming=True)
    results = list(manager.request_id_iter(name))
    assert len(results) > 3
    for result in results:
        (accepted,) = result.speculation.accepted_per_step
        assert len(result.generated_tokens) == 1 + sum(accepted) + len(accepted)
        assert result.speculation.num_accepted_tokens == sum(accepted)


def test_why_a_text_ends(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    """With its last allowed token, too."""
    text = text_alone(target, PROMPTS[0], max_new_tokens=20)
    end = text.index(text[7])
    for options, length, reason in (
        ({"max_new_tokens": 20}, 20, "length"),
        ({"max_new_tokens": 20, "eos_token_id": text[7]}, end + 1, "stop"),
        ({"max_new_tokens": end + 1, "eos_token_id": text[7]}, end + 1, "stop"),
    ):
        name = manager.add_request(PROMPTS[0], do_sample=False, streaming=True, **options)
        *others, last = manager.request_id_iter(name)
        assert all(other.finish_reason is None for other in others)
        assert (last.finish_reason, len(last.generated_tokens)) == (reason, length)


def test_names_that_are_taken(manager: SpeculativeBatchingManager) -> None:
    taken = [manager.add_request(PROMPTS[0], f"req_{number}", max_new_tokens=100) for number in (0, 1, 3)]
    names = [*(manager.add_request(PROMPTS[0], max_new_tokens=2) for _ in range(2))]
    names += manager.add_requests(PROMPTS[:2], max_new_tokens=2)
    assert len({*taken, *names}) == 7
    assert all(manager.get_result(name).error is None for name in [*names, *taken])


def test_iteration_over_all_results(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    manager = manager_of(target, draft)
    names = manager.add_requests(PROMPTS, max_new_tokens=10, record_timestamps=True)
    manager.start()
    found = {}
    for result in manager:
        found[result.request_id] = result
        if len(found) == len(names):
            manager.stop()
    assert set(found) == set(names) and not manager.is_running()
    assert all(len(result.timestamps) == 10 for result in found.values())
    assert manager.get_result() is None


def test_handlers_in_an_event_loop(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    async def collect(prompt: list[int], registers_first: bool) -> list[list[int]]:
        done, texts = asyncio.Event(), []

        def handle(result: Any) -> None:
            texts.append(result.generated_tokens)
            if result.is_finished():
                done.set()

        name = f"{prompt[0]}-{registers_first}"
        if registers_first:
            manager.register_result_handler(name, handle)
        manager.add_request(prompt, request_id=name, max_new_tokens=12, do_sample=False, streaming=True)
        if not registers_first:
            await asyncio.sleep(0.05)  # results are there before the handler
            manager.register_result_handler(name, handle)
        await done.wait()
        return texts

    async def collect_all() -> list[list[list[int]]]:
        return await asyncio.gather(*(collect(prompt, first) for prompt in PROMPTS for first in (True, False)))

    for number, texts in enumerate(asyncio.run(collect_all())):
        assert texts[-1] == text_alone(target, PROMPTS[number // 2], max_new_tokens=12)
        assert sorted(texts, key=len) == texts
    assert manager.get_result(timeout=0.01) is None


def test_a_listener_is_told_all_results_of_a_step_together(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    told, threads = [], set()

    def listen(results: list[Any]) -> None:
        told.append(results)
        threads.add(threading.current_thread().name)

    manager = manager_of(target, draft)
    manager.listen(listen)
    names = manager.add_requests(PROMPTS, max_new_tokens=12, do_sample=False, streaming=True)
    with manager:
        pass
    texts = {name: [] for name in names}
    for results in told:
        for result in results:
            texts[result.request_id].append(result.generated_tokens)
    assert max(map(len, told)) >= 3 and threads == {"hf-specdec-manager"}
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert texts[name][-1] == text_alone(target, prompt, max_new_tokens=12)
        assert sorted(texts[name], key=len) == texts[name]
    assert manager.get_result(timeout=0.01) is None


def test_a_listener_that_fails_ends_the_manager_and_all_requests(target: PreTrainedModel) -> None:
    def fails(_: Any) -> None:
        raise OSError("no more")

    manager = manager_of(target, NgramDraft())
    manager.listen(fails)
    names = manager.add_requests(PROMPTS, max_new_tokens=12, streaming=True)
    manager.start()
    results = [manager.get_result(name, timeout=30) for name in names]
    assert all("no more" in result.error for result in results) and "no more" in str(
        manager.background_thread_status.fatal_error
    )
    assert_nothing_left(manager)


def test_results_by_name_are_not_searched_for() -> None:
    """Many queued results, taken in another order: each is looked at a few times, however many there are."""
    looked_at = []

    class Result:
        def __init__(self, name: str):
            self.name = name

        @property
        def request_id(self) -> str:
            looked_at.append(self.name)
            return self.name

    results, queued = Results(), [Result(f"req_{number % 50}") for number in range(100)]
    results.deliver(cast("list[SpeculativeGenerationOutput]", queued))
    assert results.get(None, 0) is queued[0] and results.get("req_7", 0) is queued[7]
    for number in (*range(49, 7, -1), *range(6, 0, -1)):
        assert results.get(f"req_{number}", 0) is queued[number]
    assert [results.get(None, 0) for _ in range(50)] == queued[50:]
    assert results.get(None, 0) is None and results.get("req_7", 0) is None
    assert len(looked_at) <= 4 * len(queued)
