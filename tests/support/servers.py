"""A server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_specdec import NgramDraft
from hf_specdec.serving.engine.client import EngineClient
from hf_specdec.serving.engine.server import EngineServer

from .batches import limits
from .models import tiny_model
from .tokenizer import tiny_tokenizer


SECONDS_TO_START = 120
CONTENTS = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that shows the model no more than what messages say."""


@contextmanager
def engine_over(manager: Any, tokenizer: Any) -> Iterator[EngineClient]:
    """A client of a manager, with the pipe between them and without the process."""
    connection, theirs = multiprocessing.Pipe()
    serving = threading.Thread(target=EngineServer(manager, tokenizer, theirs).serve)
    serving.start()
    client = EngineClient(connection)
    client.wait_until_loaded()
    try:
        yield client
    finally:
        client.close()
        serving.join()
        theirs.close()


@contextmanager
def client_over(
    model: Any = None,
    chat_template: str = CONTENTS,
    name: str = "tiny",
    warm_up: bool = False,
    tokenizer: Any = None,
    **options: Any,
) -> Iterator[tuple[Any, EngineClient]]:
    """
    A client of the server's application in this process, over a tiny model, and the client of its engine. Failures are
    answered, as over a connection. At the end no request may be open.

    Args:
        model (`PreTrainedModel`, *optional*): the target; by default one with a context of 4096 tokens.
        chat_template (`str`): of the tokenizer.
        name (`str`): of the model.
        warm_up (`bool`): whether the manager warms up first.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's.
        options: of `build_app`.
    """
    from fastapi.testclient import TestClient

    from hf_specdec.serving.app import build_app

    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    target = tiny_model(max_position_embeddings=4096) if model is None else model
    tokenizer.chat_template = chat_template
    batching: dict[str, Any] = {"tree": "[(0,)]", "continuous_batching_config": limits()}
    made = target.init_continuous_batching(assistant_model=NgramDraft(), **batching)
    if warm_up:
        made.warmup()
    with (
        made as manager,
        engine_over(manager, tokenizer) as engine,
        TestClient(build_app(engine, tokenizer, name, **options), raise_server_exceptions=False) as client,
    ):
        yield client, engine
        end = time.monotonic() + 20
        while engine._open and time.monotonic() < end:  # what was cancelled last may still end
            time.sleep(0.01)
        assert not engine._open and not engine._open._handlers


@contextmanager
def running_server(*arguments: str, log: Path) -> Iterator[str]:
    """Runs `hf-specdec serve …` while inside; gives its address, `http://127.0.0.1:…`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hf_specdec.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_healthy(address, process, log)
            yield address
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert "leaked" not in log.read_text()


def _wait_until_healthy(address: str, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and process.poll() is None:
        try:
            if read(f"{address}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-4000:]}")


def read(address: str) -> str:
    """What a GET of an address returns."""
    with urllib.request.urlopen(address, timeout=10) as response:
        return response.read().decode()


def metric(address: str, name: str) -> float:
    """The value of one metric of a server, summed over its labels."""
    lines = [line for line in read(f"{address}/metrics").splitlines() if line.split("{")[0] == name]
    assert lines, f"no metric {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


FORKED = SimpleNamespace(get_context=lambda method: multiprocessing.get_context("fork"))
"""
In the place of the engine's `multiprocessing`: its process is forked, for tests of what comes after the start. A
spawned one has to import torch and transformers first, which takes longer than the test.
"""
