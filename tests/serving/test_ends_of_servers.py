"""How a server ends: asked to, killed, while its engine loads, or with a step that hangs."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tqdm
from support.goldens import TINY_TARGET
from support.servers import FORKED

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.cli import main
from hf_specdec.serving.engine import start as engine_start
from hf_specdec.serving.engine.messages import NotServed
from hf_specdec.serving.engine.options import EngineOptions
from hf_specdec.serving.engine.process import run


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


def serve(log: Path, forks: bool, before: Callable[[], None]) -> None:
    """Runs `hf-specdec serve` in this process, a fork of the tests', in a process group of its own."""
    os.setsid()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if forks:
        engine_start.multiprocessing = FORKED
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
        while "Ready." not in log.read_text():
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


@pytest.mark.parametrize("name", ["command line", "engine"])
def test_progress_bars_leave_no_semaphore(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's resource tracker would warn of it where a signal ends the process, as that of an engine that loads."""
    monkeypatch.delattr(tqdm.std.TqdmDefaultWriteLock, "mp_lock", raising=False)
    monkeypatch.setattr(tqdm.std.tqdm, "_lock", None, raising=False)
    monkeypatch.delattr(tqdm.std.tqdm, "_lock")
    monkeypatch.setattr(multiprocessing, "RLock", lambda: pytest.fail("a semaphore"))
    if name == "engine":
        sent: list[Any] = []
        options = EngineOptions("no/where/at/all", "ngram", SpeculativeConfig(), "cpu", "float32")
        run(options, SimpleNamespace(send=sent.append))
        assert isinstance(sent[-1], NotServed)
    else:
        monkeypatch.setattr(sys, "argv", ["hf-specdec", "serve", "--help"])
        with pytest.raises(SystemExit):
            main()
    with tqdm.tqdm(total=1, file=io.StringIO()) as bar:
        bar.update()


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
