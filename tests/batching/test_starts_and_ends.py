"""Starts and ends of the manager's thread at bad moments: every request gets one result, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Full
from typing import Any

import pytest
from support.batches import assert_nothing_left, limits, text_alone
from support.models import tiny_model

from hf_specdec import NgramDraft
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.batching.loop import STOPPED, RequestLoop
from hf_specdec.batching.pauses import Pauses


PROMPT = [4, 5, 6]


def make(**options: Any) -> SpeculativeBatchingManager:
    return tiny_model().init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,), (0, 0)]", continuous_batching_config=limits(**options)
    )


def fail_at(manager: SpeculativeBatchingManager, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the engine's step of this number fail as a device does that is out of memory."""
    step = manager.engine.step

    def fails() -> Any:
        if manager.engine.num_steps >= number:
            raise MemoryError("out of memory")
        return step()

    monkeypatch.setattr(manager.engine, "step", fails)


def test_a_listener_that_raises_when_a_step_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results that it did not take are in the queue, and no name stays taken."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    manager = make()

    def listen(outputs: list[Any]) -> None:
        raise RuntimeError("not today")

    manager.listen(listen)
    names = manager.add_requests([PROMPT] * 3, max_new_tokens=50)
    fail_at(manager, 3, monkeypatch)
    manager.start()
    manager.join(timeout=60)
    errors = {name: manager.get_result(name, timeout=0).error for name in names}
    assert all("MemoryError: out of memory" in error for error in errors.values())
    assert_nothing_left(manager)


def test_how_long_the_end_took(caplog: pytest.LogCaptureFixture) -> None:
    """`join` logs it, as transformers' does."""
    manager = make()
    manager.start()
    with caplog.at_level("INFO", logger="hf_specdec.batching.thread"):
        manager.join(time.perf_counter(), timeout=0.01)
        assert manager.is_running() and " has ended " not in caplog.text
        manager.stop()
        manager.join(time.perf_counter() - 100)
        manager.join()
    first, second = (text for record in caplog.records if " has ended " in (text := record.getMessage()))
    assert " ended 0." in first and " ended 100." in second


def test_blocks_of_a_failed_step_are_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed may have written NaN."""
    manager = make()
    manager.add_request(PROMPT, max_new_tokens=50)
    fail_at(manager, 3, monkeypatch)
    blocks: list[int] = []
    end = manager.engine.end

    def noted(request: Any) -> None:
        blocks.extend(request.table.blocks)
        end(request)

    monkeypatch.setattr(manager.engine, "end", noted)
    manager.start()
    manager.join(timeout=60)
    assert blocks and not manager.engine.target.cache.clean_blocks.intersection(blocks)


def test_threads_that_start_a_manager_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them does."""
    manager, ran = make(), []
    opens, run = RequestLoop._open, RequestLoop._run

    def slow(self: RequestLoop, *args: Any) -> None:
        time.sleep(0.05)
        opens(self, *args)

    def noted(self: RequestLoop) -> None:
        ran.append(threading.get_ident())
        run(self)

    monkeypatch.setattr(RequestLoop, "_open", slow)
    monkeypatch.setattr(RequestLoop, "_run", noted)
    starters = [threading.Thread(target=manager.start) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    manager.stop()
    assert len(ran) == 1


def test_what_is_to_be_prepared_comes_before_requests() -> None:
    """Also if the pause that has put it off is gone before the thread has rested."""
    manager, seen = make(), []
    with manager:
        manager._loop.prepare = lambda: seen.append(len(manager.engine.scheduler.active))
        output = manager.get_result(manager.add_request(PROMPT, max_new_tokens=9), timeout=60)
    assert output.generated_tokens == text_alone(manager.model, PROMPT, max_new_tokens=9)
    assert seen == [0]


@pytest.mark.filterwarnings("error:.*could not warm up")
def test_a_failed_warm_up_leaves_nothing_though_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()

    def fails() -> None:
        for request in manager._admission.dummy_requests(2, do_sample=False):
            manager.engine.scheduler.add(request)
        raise RuntimeError("nothing works")

    manager._loop.prepare = fails
    manager.start()
    manager.join(timeout=60)
    assert "could not warm up" in str(manager.background_thread_status.fatal_error)
    assert_nothing_left(manager)


def test_a_manager_with_an_open_request_serves_no_other_call() -> None:
    manager = make()
    model, draft = manager.model, manager._admission.assistant_model
    config = limits()
    manager.start()
    manager.stop(keep_for_next_session=True)
    name = manager.add_request(PROMPT, max_new_tokens=5)
    model.generate_batch(
        [PROMPT], assistant_model=draft, tree="[(0,), (0, 0)]", max_new_tokens=3, continuous_batching_config=config
    )
    with manager:
        assert manager.get_result(name, timeout=10).error is None


def test_a_pause_that_another_thread_leaves() -> None:
    with make() as manager:
        pause = manager.pause()
        entering = threading.Thread(target=pause.__enter__)
        entering.start()
        entering.join()
        pause.__exit__(None, None, None)
        assert manager.get_result(manager.add_request(PROMPT, max_new_tokens=3), timeout=60).error is None


def test_an_interrupted_pause_does_not_rest_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    pauses = Pauses()
    monkeypatch.setattr(pauses._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pauses.rest()
    assert not pauses._rests


def test_stopping_from_another_thread_what_runs_in_this_one() -> None:
    manager, stopping = make(), []
    name = manager.add_request(PROMPT, max_new_tokens=150, streaming=True)

    def take(outputs: list[Any]) -> None:
        if not stopping:
            stopping.append(threading.Thread(target=manager.stop, kwargs={"hard_stop": True}, daemon=True))
            stopping[0].start()

    manager.run_here(take)
    stopping[0].join(timeout=30)
    assert not stopping[0].is_alive() and not manager.is_running() and name not in manager._loop.inbox


def test_running_here_what_runs_already() -> None:
    """Unread results stay."""
    with make() as manager:
        name = manager.add_request(PROMPT, max_new_tokens=3)
        while name in manager._loop.inbox:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="is running already"):
            manager.run_here(lambda outputs: None)
        assert manager.get_result(name, timeout=10).error is None


def test_destroying_a_manager_that_never_ran() -> None:
    manager = make()
    name = manager.add_request(PROMPT, max_new_tokens=3)
    manager.destroy()
    assert manager.get_result(name).error == STOPPED
    assert_nothing_left(manager)


@pytest.mark.parametrize("other", ["destroy", "start"])
def test_destroying_a_manager_while_another_thread(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, when the other is faster: every request gets one result, and nothing runs any more."""
    manager = make()
    names = manager.add_requests([PROMPT] * 3, max_new_tokens=30)
    fail_idle = manager._loop.fail_idle

    def late(error: str) -> bool:
        monkeypatch.setattr(manager._loop, "fail_idle", fail_idle)
        thread = threading.Thread(target=getattr(manager, other))
        thread.start()
        thread.join()
        return fail_idle(error)

    monkeypatch.setattr(manager._loop, "fail_idle", late)
    manager.destroy()
    assert not manager.is_running()
    assert sorted(output.request_id for output in manager) == sorted(names)
    assert_nothing_left(manager)


def test_listeners_that_use_the_manager_while_another_thread_starts_it() -> None:
    """A listener may hold up deliveries, but no start."""
    manager, begun, started = make(), threading.Event(), threading.Event()
    manager.add_request(PROMPT, max_new_tokens=3)

    def listen(outputs: list[Any]) -> None:
        begun.set()
        assert started.wait(30)
        manager.cancel_request("nobody")

    manager.listen(listen)
    destroying = threading.Thread(target=manager.destroy)
    destroying.start()
    assert begun.wait(30)
    manager.start()
    started.set()
    destroying.join(30)
    manager.stop()


def test_listeners_get_no_empty_lists() -> None:
    manager, lengths = make(), []
    manager.listen(lambda outputs: lengths.append(len(outputs)))
    with manager:
        manager.add_request(PROMPT, max_new_tokens=3)
    assert lengths == [1]


def test_a_thread_that_is_gone_holds_its_pause_alone() -> None:
    """Its number may be another thread's by now, which is not inside the pause."""
    with make() as manager:
        pause = manager.pause()
        entering = threading.Thread(target=pause.__enter__)
        entering.start()
        entering.join()
        held = []
        for _ in range(20):
            asking = threading.Thread(target=lambda: held.append(manager._loop.pauses.are_held_here))
            asking.start()
            asking.join()
        pause.__exit__(None, None, None)
    assert held == [False] * 20


def test_waiting_inside_a_pause_for_what_cannot_come() -> None:
    with make() as manager, manager.pause():
        manager.add_request(PROMPT, max_new_tokens=3)
        with pytest.raises(RuntimeError, match="`get_result`: inside a `pause`"):
            manager.get_result()
        with pytest.raises(RuntimeError, match="`join`: inside a `pause`"):
            manager.join()


def test_iteration_yields_what_is_left_when_the_manager_has_ended() -> None:
    manager = make()
    names = manager.add_requests([PROMPT] * 3, max_new_tokens=3)
    manager.start()
    manager.stop()
    assert {output.request_id for output in manager} == set(names)


def test_a_queue_that_fills_while_a_request_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make(max_requests_per_batch=1, max_queue_size=1)
    manager.add_request(PROMPT, max_new_tokens=3)
    prepare = manager._admission.request

    def slow(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(manager._admission, "request", prepare)
        manager.add_request(PROMPT, max_new_tokens=3)  # another thread is faster
        return prepare(*args, **options)

    monkeypatch.setattr(manager._admission, "request", slow)
    with pytest.raises(Full):
        manager.add_request(PROMPT, max_new_tokens=3)
    assert len(manager._loop.inbox) == 2


ENDS_WITHOUT_STOPPING = """
from support.batches import limits
from support.models import tiny_model
import hf_specdec

manager = tiny_model().init_continuous_batching(
    assistant_model=hf_specdec.NgramDraft(), tree="[(0,)]", continuous_batching_config=limits()
)
manager.start()
manager.add_request([1, 2], max_new_tokens=200)
print("the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "last",
    [
        pytest.param("", id="running"),
        pytest.param("pause = manager.pause()\npause.__enter__()", id="paused"),
    ],
)
def test_a_program_that_ends_without_stopping(last: str) -> None:
    """Its thread is ended first: killed in the midst of a step, it would abort the program. A pause goes on."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_STOPPING + last],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == "the end\n" and "did not end" not in done.stderr, done.stderr
