"""The engine in a process of its own: how it starts and ends, and what becomes of those who wait for it then."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import queue
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.batches import limits, text_alone
from support.goldens import TINY_TARGET
from support.models import tiny_model
from support.servers import FORKED, engine_over
from support.tokenizer import tiny_tokenizer
from transformers import GenerationConfig

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.serving.engine import process as engine_process
from hf_specdec.serving.engine import start as engine_start
from hf_specdec.serving.engine.client import EngineClient
from hf_specdec.serving.engine.options import EngineOptions, StartError
from hf_specdec.serving.engine.start import running_engine
from hf_specdec.serving.interpreter import let_steps_go_first


PROMPT = [5, 6, 7]
HEAD_OF_ANOTHER = Path(__file__).parents[2] / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"


def options(**changes: Any) -> EngineOptions:
    config = SpeculativeConfig(tree="[(0,)]")
    given = {"target": str(TINY_TARGET), "draft": "ngram", "speculative_config": config, "device": "cpu"}
    return EngineOptions(**given | {"dtype": "float32", "num_blocks": 60} | changes)


@contextmanager
def here(**changes: Any) -> Iterator[tuple[Any, EngineClient]]:
    """A manager and its client, in this process."""
    given = {"continuous_batching_config": limits(), **changes}
    with tiny_model().init_continuous_batching(assistant_model=NgramDraft(), tree="[(0,)]", **given) as manager:
        with engine_over(manager, tiny_tokenizer()) as engine:
            yield manager, engine


async def results_of(engine: EngineClient, length: int, name: str = "one", **request: Any) -> tuple[list, list[int]]:
    """The results of a request as they come, and how many tokens there were with each."""
    done = asyncio.get_running_loop().create_future()
    results, counts = [], []

    def note(result: Any) -> None:
        results.append(result)
        counts.append(len(result.generated_tokens))
        if result.is_finished():
            done.set_result(None)

    config = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1)
    engine.register_result_handler(name, note)
    await engine.add_request(PROMPT, name, generation_config=config, **request)
    await asyncio.wait_for(done, 60)
    return results, counts


# ------------------------------------------------------------------------------------------------------ what it tells


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_tokens_are_told_once(streaming: bool) -> None:
    with here() as (manager, engine):
        results, counts = asyncio.run(results_of(engine, 40, streaming=streaming))
        assert results[-1].generated_tokens == text_alone(manager.model, PROMPT, max_new_tokens=40, eos_token_id=-1)
        assert len(results) > 10 if streaming else len(results) == 1
        assert counts[-1] == 40
        assert engine.state.num_generation_tokens == 40 and not engine._open and not engine._open._handlers


@pytest.mark.parametrize(
    "request_, kind, message",
    [
        ({"input_ids": [10**6]}, ValueError, "input_ids"),
        ({"generation_config": GenerationConfig(max_new_tokens=10**6)}, ValueError, "never fit"),
        ({"generation_config": GenerationConfig(max_new_tokens=4, num_beams=2)}, ValueError, "beam"),
        ({"seed": "seven"}, TypeError, "seed"),
        (
            {"generation_config": GenerationConfig(max_new_tokens=4, exponential_decay_length_penalty=[])},
            RuntimeError,
            "IndexError",
        ),
        ({"generation_config": GenerationConfig(max_new_tokens=4, stop_strings=[None])}, TypeError, "stop_strings"),
        ({"generation_config": GenerationConfig(max_new_tokens=4, suffix=lambda: 0)}, RuntimeError, "pickle"),
    ],
)
def test_refusals_have_their_kind(request_: dict[str, Any], kind: type[Exception], message: str) -> None:
    asked = {"input_ids": PROMPT, "generation_config": GenerationConfig(max_new_tokens=4)} | request_

    async def ask() -> None:
        told = []
        engine.register_result_handler("one", told.append)
        with pytest.raises(kind, match=message):
            await engine.add_request(asked.pop("input_ids"), "one", **asked)
        await asyncio.sleep(0)
        assert [result.error is not None for result in told] == [True]

    with here() as (manager, engine):
        asyncio.run(ask())
        assert not engine._open and not engine._open._handlers and manager.state.num_running == 0
        assert asyncio.run(results_of(engine, 5))[1] == [5]  # the others are served


def test_a_full_queue() -> None:
    async def ask() -> None:
        config = GenerationConfig(max_new_tokens=600, eos_token_id=-1)
        asked = [engine.add_request(PROMPT, f"{number}", generation_config=config) for number in range(20)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert any(isinstance(one, queue.Full) for one in found) and found[0] is None
        for number in range(20):
            engine.cancel_request(f"{number}")

    with here(continuous_batching_config=limits(max_queue_size=1, max_requests_per_batch=2)) as (_, engine):
        asyncio.run(ask())


def test_a_client_that_takes_leave_is_asked_for_nothing_more() -> None:
    config = GenerationConfig(max_new_tokens=700, eos_token_id=-1)

    async def ask() -> None:
        await engine.add_request(PROMPT, "one", generation_config=config)

    with tiny_model().init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits()
    ) as manager:
        with engine_over(manager, tiny_tokenizer()) as engine:
            asyncio.run(ask())
        until = time.monotonic() + 10
        while manager.state.num_running + manager.state.num_waiting > 0:
            assert time.monotonic() < until, "it still runs"
            time.sleep(0.01)
    assert manager.state.num_generation_tokens < 700


def test_an_error_of_the_model_reaches_those_who_wait() -> None:
    async def ask() -> None:
        results, _ = await results_of(engine, 100, streaming=True)
        assert "no more" in results[-1].error
        assert "no more" in str(engine.fatal_error)
        with pytest.raises(RuntimeError, match="has ended.*no more"):
            engine.add_request(PROMPT, "another", generation_config=GenerationConfig(max_new_tokens=4))
        state = await asyncio.to_thread(lambda: engine.state)
        assert 0 < state.num_generation_tokens < 100

    with here() as (manager, engine):
        forward, calls = manager.model.model.forward, []

        def failing(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > 5:
                raise OSError("no more")
            return forward(*args, **kwargs)

        manager.model.model.forward = failing
        try:
            asyncio.run(ask())
        finally:
            del manager.model.model.forward


# --------------------------------------------------------------------------------------------------------- the process


def test_steps_go_first() -> None:
    """What has been loaded is not searched for garbage, of which none is kept, and threads are switched often."""
    interval, cycle = sys.getswitchinterval(), EngineOptions(None, "ngram", SpeculativeConfig(), "cpu", "float32")
    vars(cycle)["itself"] = cycle
    garbage = weakref.ref(cycle)
    del cycle
    try:
        let_steps_go_first()
        assert garbage() is None
        assert gc.get_freeze_count() > 1000 and len(gc.get_objects()) < 1000
        assert sys.getswitchinterval() < interval
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


def test_an_engine_lets_steps_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its models are loaded, and before it warms up."""
    done: list[str] = []

    class Manager:
        def __enter__(self) -> Manager:
            raise KeyboardInterrupt

        def __exit__(self, *error: Any) -> None:
            pass

        def warmup(self) -> None:
            done.append("warmup")

    def load(options: EngineOptions, tell: Any) -> tuple[Manager, None]:
        done.append("load")
        return Manager(), None

    monkeypatch.setattr(engine_process, "load", load)
    monkeypatch.setattr(engine_process, "let_steps_go_first", lambda: done.append("let_steps_go_first"))
    with pytest.raises(KeyboardInterrupt):
        connection: Any = SimpleNamespace(send=lambda stage: None)
        engine_process.run(options(), connection)
    assert done == ["load", "let_steps_go_first", "warmup"]


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_start, "multiprocessing", FORKED)


@pytest.mark.usefixtures("_forked")
def test_a_process() -> None:
    with running_engine(options()) as engine:
        assert engine.model.config.model_type == "llama"
        results, counts = asyncio.run(results_of(engine, 24, streaming=True))
        assert results[-1].error is None and counts[-1] == 24 and len(results) > 5
        [process] = multiprocessing.active_children()
    assert not process.is_alive() and process.exitcode == 0


@pytest.mark.usefixtures("_forked")
def test_a_process_that_is_killed() -> None:
    async def ask() -> None:
        asked = asyncio.ensure_future(results_of(engine, 500, streaming=True))
        await asyncio.sleep(0.3)
        [process] = multiprocessing.active_children()
        process.kill()
        results, _ = await asked
        assert "has ended" in results[-1].error and engine.fatal_error is not None
        with pytest.raises(RuntimeError, match="has ended"):
            engine.add_request(PROMPT, "another", generation_config=GenerationConfig(max_new_tokens=4))
        with pytest.raises(RuntimeError, match="has ended"):
            await asyncio.to_thread(lambda: engine.state)

    with running_engine(options()) as engine:
        asyncio.run(ask())


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(
    "changes, option, reason",
    [
        pytest.param({"target": "no/such/folder/here"}, "TARGET", "no/such/folder/here", id="target"),
        pytest.param({"draft": "no/such/draft"}, "--draft", "no/such/draft", id="draft", marks=pytest.mark.slow),
        pytest.param({"draft": str(HEAD_OF_ANOTHER)}, "--draft", "vocabulary", id="together", marks=pytest.mark.slow),
        pytest.param({"dtype": "float33"}, "serve", "exit code 1", id="unforeseen", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_start(changes: dict[str, Any], option: str, reason: str) -> None:
    with pytest.raises(StartError, match=reason) as error:
        with running_engine(options(**changes)):
            raise AssertionError("it runs")
    assert error.value.option == option
    assert not multiprocessing.active_children()
