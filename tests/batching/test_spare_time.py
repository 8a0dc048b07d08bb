"""Graphs that are captured after the manager is ready, with a stand-in for CUDA's graphs."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone, wait_until
from support.graphs import StandIn, install_stand_in
from support.models import noisy_copy
from support.sampling import TREE, VOCAB, a_head, the_target

from hf_specdec import NgramDraft, TokenTree, graphs
from hf_specdec.batching import SpeculativeBatchingManager, warming_up
from hf_specdec.engine.captured import stored
from hf_specdec.engine.captured.ahead import PromptsAhead, StepAhead
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.request import RequestStatus
from hf_specdec.graphs.paged import PagedGraphs


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

CHAIN = TokenTree.chain(2)
DRAWN = {"do_sample": True}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.fixture
def no_spare_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming_up.WarmUp, "use_spare_time", lambda self, seconds: False)


def warm_manager(target: Any, draft: Any, tree: Any = CHAIN, most: int = 4, **options: Any) -> Any:
    manager = target.init_continuous_batching(
        assistant_model=draft,
        tree=tree,
        continuous_batching_config=limits(400, max_requests_per_batch=most, **options),
    )
    manager.warmup()
    return manager


def small_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Prompts of the tokens that `the_target` knows."""
    return [[token % VOCAB for token in prompt] for prompt in ragged_prompts(lengths)]


def run_load(manager: SpeculativeBatchingManager, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    names = manager.add_requests(prompts, **options)
    outputs = [manager.get_result(name, timeout=60) for name in names]
    assert not any(output.error for output in outputs)
    return [output.generated_tokens for output in outputs]


# ------------------------------------------------------------------------------------------------------ ready at once


@pytest.mark.slow
@pytest.mark.usefixtures("no_spare_time", "few_trees")
@pytest.mark.parametrize("kind", ["head", "draft", "ngram"])
@pytest.mark.parametrize("tree", [TREE, "auto"], ids=["static", "auto"])
def test_loads_of_any_size_capture_nothing(
    tree: Any, kind: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs in the next larger graph that there is, prompts included, and texts are what they are alone."""
    monkeypatch.setattr(PagedGraphs, "prompt_widths", (8, 16))
    target = copy.deepcopy(the_target()).float()
    draft = {"head": lambda: a_head(None).float(), "draft": lambda: noisy_copy(target, 0.05), "ngram": NgramDraft}
    manager = warm_manager(target, draft[kind](), tree, most=12, max_batch_tokens=64)
    prompts = small_prompts((9, 1, 30, 17, 5, 12, 26, 3, 7, 19, 2, 11))
    expected = [text_alone(target, prompt, max_new_tokens=8) for prompt in prompts]
    with manager:
        wait_until(lambda: manager.is_warm)
        captures, steps = stand_in.captures, manager.engine.device_steps
        before = set(steps.stored), set(steps.prompts.stored)
        assert {key.size.rows for key in steps.stored} == {12, 3, 1}
        for number in (1, 2, 4, 12, 5):
            assert run_load(manager, prompts[:number], max_new_tokens=8) == expected[:number]
            run_load(manager, prompts[:number], max_new_tokens=8, **DRAWN)
        manager.add_requests(prompts[:3], max_new_tokens=8, **DRAWN)
        assert run_load(manager, prompts[:4], max_new_tokens=8) == expected[:4]
        for _ in range(3):
            manager.get_result(timeout=60)
        if kind == "head":  # forwards of other drafts, on the host's demand, are captured one by one
            assert stand_in.captures == captures
        assert (set(steps.stored), set(steps.prompts.stored)) == before
    assert_nothing_left(manager)


def test_nothing_is_captured_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers would be neither fused nor compiled as in steps: the kernels have no gradients."""
    modes: list[bool] = []
    run = InFlightStep._run
    monkeypatch.setattr(InFlightStep, "_run", lambda self: modes.append(torch.is_grad_enabled()) or run(self))
    manager = warm_manager(copy.deepcopy(the_target()).float(), a_head(None).float())
    with manager:
        wait_until(lambda: manager.is_warm)
        before = len(modes)
        wait_until(lambda: manager.state.num_graphs_left == 0)
        assert 0 < before < len(modes)
    assert not any(modes)
    assert_nothing_left(manager)


@pytest.mark.usefixtures("no_spare_time")
@pytest.mark.parametrize("tree", [TREE, "auto"], ids=["static", "auto"])
def test_few_graphs_are_captured_before_it_is_ready(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a manager with the default limits needs."""
    captured: list[Any] = []
    for kind in (StepAhead, PromptsAhead):
        monkeypatch.setattr(kind, "capture", lambda self, steps: captured.append(self) or [])
    target = copy.deepcopy(the_target()).float()
    manager = warm_manager(target, a_head(None).float(), tree, most=256, max_batch_tokens=8192)
    with manager:
        wait_until(lambda: manager.is_warm)
        assert 20 <= len(captured) <= 30
        assert manager.state.num_graphs_left > 30
    assert_nothing_left(manager)


# --------------------------------------------------------------------------------------------------- in spare time


@pytest.mark.usefixtures("few_trees")
@pytest.mark.parametrize(("tree", "most"), [(CHAIN, 3), ("auto", 1)], ids=["static", "auto"])
@pytest.mark.some_cases(1)
def test_the_others_follow(tree: Any, most: int) -> None:
    """One by one; requests between them are served as ever, and their texts and counts are their own."""
    target = copy.deepcopy(the_target()).float()
    prompts = small_prompts((9, 3, 5)[:most])
    expected = [text_alone(target, prompt, max_new_tokens=20) for prompt in prompts]
    manager = warm_manager(target, a_head(None).float(), tree, most)
    with manager:
        wait_until(lambda: manager.is_warm)
        first, left = set(manager.engine.device_steps.stored), manager.state.num_graphs_left
        assert left > 3
        wait_until(lambda: manager.state.num_graphs_left < left)
        assert run_load(manager, prompts, max_new_tokens=20) == expected
        wait_until(lambda: manager.state.num_graphs_left == 0)
        assert run_load(manager, prompts, max_new_tokens=20) == expected
        assert set(manager.engine.device_steps.stored) > first
        assert {key.size.rows for key in manager.engine.device_steps.stored} == set(range(1, most + 1))
        assert manager.state.num_generation_tokens == 40 * most
    assert_nothing_left(manager)


@pytest.mark.slow
def test_what_has_come_often_comes_first(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside open requests, too, if these are few and have not waited long for captures."""
    monkeypatch.setattr(stored, "PATIENCE", 5)
    monkeypatch.setattr(warming_up, "PATIENCE", 5)
    monkeypatch.setattr(warming_up, "SHARE_OF_TIME", 1e9)
    target = copy.deepcopy(the_target()).float()
    prompts = small_prompts((9, 3))
    expected = [text_alone(target, prompt, max_new_tokens=60) for prompt in prompts]
    manager = warm_manager(target, a_head(None).float(), most=12)
    names = manager.add_requests(prompts, max_new_tokens=60)
    with manager:
        assert [manager.get_result(name, timeout=120).generated_tokens for name in names] == expected
        assert {key.size.rows for key in manager.engine.device_steps.stored} >= {1, 2, 3, 12}
    assert_nothing_left(manager)


@pytest.mark.parametrize("reason", ["waiting", "reading", "slow"])
def test_nothing_is_captured_while_requests_cannot_wait(reason: str) -> None:
    target = copy.deepcopy(the_target()).float()
    manager = target.init_continuous_batching(
        assistant_model=a_head(None).float(), tree=CHAIN, continuous_batching_config=limits(400)
    )
    engine, scheduler = manager.engine, manager.engine.scheduler
    warm_up = warming_up.WarmUp(engine, manager._admission.dummy_requests)
    warm_up._beside_requests.time = 1e6
    scheduler.active = manager._admission.dummy_requests(9, False)
    for request in scheduler.active:
        request.status = RequestStatus.PREFILLING if reason == "reading" else RequestStatus.DECODING
    if reason == "waiting":
        scheduler.waiting.extend(manager._admission.dummy_requests(1, False))
    if reason == "slow":
        warm_up._beside_requests.spent_on_trials = 1e5
    assert not warm_up._may_wait
    scheduler.waiting.clear()
    scheduler.active, warm_up._beside_requests.spent_on_trials = manager._admission.dummy_requests(1, False), 0.0
    scheduler.active[0].status = RequestStatus.DECODING
    assert warm_up._may_wait


def test_captures_beside_requests_are_few() -> None:
    """A hundredth of the time of steps is for them, and each is expected to take as long as the longest did."""
    target = copy.deepcopy(the_target()).float()
    manager = target.init_continuous_batching(
        assistant_model=a_head(None).float(), tree=CHAIN, continuous_batching_config=limits(400)
    )
    warm_up = warming_up.WarmUp(manager.engine, manager._admission.dummy_requests)
    requests = manager._admission.dummy_requests(1, False)
    requests[0].status = RequestStatus.DECODING
    manager.engine.scheduler.active = requests
    warm_up._recent.extend([0.2, 1.6, 0.1])
    for seconds, may_wait in ((150.0, False), (15.0, True)):
        assert not warm_up.use_spare_time(seconds)  # nothing is left to capture
        assert warm_up._may_wait == may_wait
    warm_up._beside_requests.spent_on_trials += 1.6
    assert not warm_up.use_spare_time(100.0) and not warm_up._may_wait


@pytest.mark.usefixtures("few_trees")
def test_idle_time_is_no_time_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither between loads nor in a pause: an idle server would capture much beside its next load."""
    told: list[float] = []
    monkeypatch.setattr(warming_up.WarmUp, "use_spare_time", lambda self, seconds: told.append(seconds) or False)
    manager = warm_manager(copy.deepcopy(the_target()).float(), a_head(None).float())
    with manager:
        wait_until(lambda: manager.is_warm)
        began, steps = time.perf_counter(), 0.0
        for _ in range(3):
            start = time.perf_counter()
            run_load(manager, small_prompts((9, 3)), max_new_tokens=8)
            steps += time.perf_counter() - start
            time.sleep(0.3)
        assert 0.0 < sum(told) <= steps < time.perf_counter() - began - 0.9


def test_ranks_capture_everything_first() -> None:
    """Each would have spare time of its own, and wait for the others."""
    manager = warm_manager(copy.deepcopy(the_target()).float(), a_head(None).float())
    engine = manager.engine
    for are_several in (False, True):
        engine.ranks = SimpleNamespace(are_several=are_several)
        assert warming_up.WarmUp(engine, manager._admission.dummy_requests)._at_once == are_several


def test_a_capture_that_fails_in_spare_time_is_the_last(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> None:
    """One warning; the graphs that there are go on serving."""
    target = copy.deepcopy(the_target()).float()
    prompts, tried = small_prompts((9, 3)), []
    expected = [text_alone(target, prompt, max_new_tokens=12) for prompt in prompts]
    manager = warm_manager(target, a_head(None).float())

    def fails(*args: Any, **options: Any) -> Any:
        tried.append(args)
        raise torch.OutOfMemoryError("no memory")

    capture = StepAhead.capture

    def capture_until_ready(self: StepAhead, steps: Any) -> Any:
        if manager.is_warm:
            monkeypatch.setitem(graphs.RECORDERS, "cpu", fails)
        return capture(self, steps)

    monkeypatch.setattr(StepAhead, "capture", capture_until_ready)
    with pytest.warns(UserWarning, match="captured in spare time.*no memory") as warned, manager:
        wait_until(lambda: bool(tried) and manager.state.num_graphs_left == 0)
        replays = stand_in.replays
        assert run_load(manager, prompts, max_new_tokens=12) == expected
        assert stand_in.replays > replays and len(tried) == 1 and manager.engine.device_steps.works
    assert len(warned) == 1
    assert_nothing_left(manager)


@pytest.mark.parametrize("how", ["stop", "pause", "request"])
@pytest.mark.some_cases(1)
def test_what_comes_in_the_midst_of_a_capture(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for that one capture, of which nothing else is left."""
    target = copy.deepcopy(the_target()).float()
    prompts = small_prompts((9,))
    manager = warm_manager(target, a_head(None).float(), most=12)
    begun, may_end, captured = threading.Event(), threading.Event(), list[StepAhead]()
    capture = StepAhead.capture

    def slow(self: StepAhead, steps: Any) -> Any:
        if manager.is_warm:
            captured.append(self)
            begun.set()
            assert may_end.wait(60)
        return capture(self, steps)

    monkeypatch.setattr(StepAhead, "capture", slow)
    with manager:
        assert begun.wait(60)
        if how == "stop":
            manager._loop.stop(at_once=True)
            may_end.set()
            manager.join(30)
            assert len(captured) == 1
        elif how == "pause":
            threading.Timer(0.2, may_end.set).start()
            with manager.pause():
                assert len(captured) == 1
        else:
            name = manager.add_request(prompts[0], max_new_tokens=8)
            may_end.set()
            output = manager.get_result(name, timeout=60)
            assert output.generated_tokens == text_alone(target, prompts[0], max_new_tokens=8)
    assert_nothing_left(manager)


@pytest.mark.slow
def test_graphs_of_new_weights_follow_too(stand_in: StandIn) -> None:
    """Those that were dropped are captured again, before requests want them."""
    target = copy.deepcopy(the_target()).float()
    prompts = small_prompts((9, 3))
    manager = warm_manager(target, a_head(None).float(), most=2)
    with manager:
        wait_until(lambda: manager.is_warm and manager.state.num_graphs_left == 0)
        steps = manager.engine.device_steps
        before = set(steps.stored), set(steps.prompts.stored)
        with manager.pause():
            weight = target.model.layers[0].mlp.up_proj.weight
            weight.data = 1.01 * weight.data
        wait_until(lambda: steps.num_drops == 2 and (set(steps.stored), set(steps.prompts.stored)) == before)
        expected = [text_alone(target, prompt, max_new_tokens=12) for prompt in prompts]
        captures = stand_in.captures
        assert run_load(manager, prompts, max_new_tokens=12) == expected
        assert stand_in.captures == captures
    assert_nothing_left(manager)


def test_captures_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If more is wanted than is kept, what was dropped is wanted again only when it has come often once more."""
    for kind in (stored.CapturedSteps, stored.CapturedPrompts):
        monkeypatch.setattr(kind, "MOST", 1)
        kept: Any = kind()
        for key in ("one", "other"):
            for _ in range(stored.PATIENCE):
                kept.count(key)
        assert len(kept.wanted) == 2
        for key in ("one", "other"):
            kept.add(key, object())
        assert kept.wanted == []
        kept.count("one")
        assert kept.wanted == [(1, "one")]


def test_a_warm_manager_is_freed_at_once() -> None:
    """With its K/V, and not when Python looks for cycles."""
    managers = [warm_manager(copy.deepcopy(the_target()).float(), a_head(None).float())]
    with managers[0]:
        wait_until(lambda: managers[0].is_warm)
    gc.collect()
    gc.disable()
    try:
        engine = weakref.ref(managers[0].engine)
        managers.clear()
        assert engine() is None
    finally:
        gc.enable()
