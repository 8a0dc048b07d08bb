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
from typing import Any

from hf_specdec.serving.engine import EngineClient, EngineServer


SECONDS_TO_START = 120


@contextmanager
def engine_over(manager: Any, tokenizer: Any) -> Iterator[EngineClient]:
    """A client of a manager, with the pipe between them and without the process."""
    connection, theirs = multiprocessing.Pipe()
    serving = threading.Thread(target=EngineServer(manager, tokenizer, theirs).serve)
    serving.start()
    client = EngineClient(connection, connection.recv())
    try:
        yield client
    finally:
        client.close()
        serving.join()
        theirs.close()


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
