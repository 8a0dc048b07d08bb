"""The engine in a process of its own: how it starts and ends, and what becomes of those who wait for it then."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.batches import limits, text_alone
from support.goldens import TINY_TARGET
from support.models import tiny_model
from support.servers import engine_over
from support.tokenizer import tiny_tokenizer
from transformers import GenerationConfig

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.serving.engine import EngineClient, EngineOptions, StartError, running_engine
from hf_specdec.serving.engine import process as engine_process
from hf_specdec.serving.engine.process import let_steps_go_first


PROMPT = [5, 6, 7]
FORKED = SimpleNamespace(get_context=lambda method: multiprocessing.get_context("fork"))
"""
In the place of the engine's `multiprocessing`: its process is forked, for tests of what comes after the start. A
spawned one has to import torch and transformers first, which takes longer than the test.
"""
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


def has_ended(process_id: int, seconds: float = 20.0) -> bool:
    """Waits until a process is no more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


# ------------------------------------------------------------------------------------------------------ what it tells


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_tokens_are_told_once(streaming: bool) -> None:
    with here() as (manager, engine):
        results, counts = asyncio.run(results_of(engine, 40, streaming=streaming))
        assert results[-1].generated_tokens == text_alone(manager.model, PROMPT, max_new_tokens=40, eos_token_id=-1)
        assert len(results) > 10 if streaming else len(results) == 1
        assert counts[-1] == 40
        assert engine.state.num_generation_tokens == 40 and not engine._open and not engine._handlers


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
        assert not engine._open and not engine._handlers and manager.state.num_running == 0
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

    def load(options: EngineOptions) -> tuple[Manager, None]:
        done.append("load")
        return Manager(), None

    monkeypatch.setattr(engine_process, "load", load)
    monkeypatch.setattr(engine_process, "let_steps_go_first", lambda: done.append("let_steps_go_first"))
    monkeypatch.setattr(engine_process, "while_the_parent_lives", nullcontext)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    with pytest.raises(KeyboardInterrupt):
        engine_process._run(options(), None)
    assert done == ["load", "let_steps_go_first", "warmup"]


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "multiprocessing", FORKED)


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


def serve(log: Path, forks: bool, before: Callable[[], None]) -> None:
    """Runs `hf-specdec serve` in this process, a fork of the tests', in a process group of its own."""
    from hf_specdec.cli import main

    os.setsid()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if forks:
        engine_process.multiprocessing = FORKED
    before()
    sys.argv = ["hf-specdec", "serve", str(TINY_TARGET), "--device", "cpu", "--port", "0", "--stall-seconds", "1"]
    main()


@contextmanager
def server(
    log: Path, forks: bool = True, before: Callable[[], None] = lambda: None
) -> Iterator[tuple[multiprocessing.Process, int]]:
    """
    A server's process, and the number of its engine's process.

    Args:
        log (`Path`): file for what the server prints.
        forks (`bool`): the engine's process is forked; else it is spawned, as it is for users.
        before (`Callable`): what is done in the server's process before it starts.
    """
    pytest.importorskip("fastapi")
    log.touch()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(log, forks, before))
    process.start()
    try:
        until = time.monotonic() + 60
        while "Uvicorn running" not in log.read_text():
            assert process.is_alive() and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        names = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children}
        if forks:
            [engine] = names
        else:
            engine = next(child for child, name in names.items() if "spawn_main" in name)
        yield process, engine
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="Ctrl-C"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow)],
)
def test_a_server_that_is_asked_to_end(tmp_path: Path, number: signal.Signals) -> None:
    """As by a terminal: all of its processes are told."""
    with server(tmp_path / "log") as (process, engine):
        os.killpg(process.pid, number)
        process.join(30)
        assert has_ended(engine)
    text = (tmp_path / "log").read_text()
    assert "Application shutdown complete" in text and "Traceback" not in text, text


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    with server(tmp_path / "log", forks=False) as (process, engine):
        process.kill()
        process.join()
        assert has_ended(engine)


SERVER_THAT_LOADS = """
import multiprocessing, time
from hf_specdec.serving.engine.parent import while_the_parent_lives

def load():
    with while_the_parent_lives():
        print("loading", flush=True)
        time.sleep(100)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=load)
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


@pytest.mark.slow
def test_a_server_that_is_killed_while_its_engine_loads(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER_THAT_LOADS)
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py")], stdout=subprocess.PIPE, text=True)
    engine = int(server.stdout.readline())
    assert server.stdout.readline() == "loading\n"
    server.kill()
    server.wait()
    assert has_ended(engine)


def status_of(address: str) -> int:
    """The HTTP status of the answer to a GET of an address."""
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGTERM], id="SIGTERM"),
        pytest.param([signal.SIGINT, signal.SIGINT], id="Ctrl-C twice", marks=pytest.mark.slow),
        pytest.param([signal.SIGKILL], id="SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_hangs_ends_with_the_server(tmp_path: Path, signals: list[signal.Signals]) -> None:
    """In a C call, which no other thread of the engine can interrupt. Its process must not outlive the server."""

    def hang(*arguments: Any) -> None:
        (tmp_path / "hangs").touch()
        ctypes.PyDLL(None).sleep(1000)  # keeps Python's global interpreter lock

    def before() -> None:
        NgramDraft.propose = hang

    with server(tmp_path / "log", before=before) as (process, engine):
        [port] = re.findall(r"http://localhost:(\d+)", (tmp_path / "log").read_text())
        with socket.create_connection(("localhost", int(port))) as connection:
            body = b'{"prompt": "abc abc abc", "max_tokens": 20}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            until = time.monotonic() + 20
            while not (tmp_path / "hangs").exists():
                assert time.monotonic() < until, (tmp_path / "log").read_text()
                time.sleep(0.05)
            while status_of(f"http://localhost:{port}/health") != 503:  # known although the engine can tell nothing
                assert time.monotonic() < until
                time.sleep(0.1)
            until = time.monotonic() + 10
            for number in signals:
                os.kill(process.pid, number)
                time.sleep(0.5)
            process.join(until - time.monotonic())
            assert has_ended(engine, until - time.monotonic())
            assert process.exitcode == -signals[0] or (signals[0] == signal.SIGINT and process.exitcode > 0)
