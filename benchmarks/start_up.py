"""
How soon a server is ready: `hf-specdec serve`, first with an empty folder for compiled code, then with what is in it.

    python benchmarks/start_up.py [--starts 2] [--limits 60 20] [-- --draft FOLDER --tree chain:5]

Each start is a fresh process with `--compile`, and with the arguments after `--`. Prints, for each start, the seconds
until the server listens, until each stage begins, and until `/health` says that it is ready and a first completion of
one token is answered, then the ten pieces and graphs that took longest to compile and capture (a graph's seconds
include those of pieces that it is the first to need), the size of the folder, and one JSON line. Ends with 1 if a
start is slower than its limit. The defaults need no network. A trial on a CPU, where nothing is compiled:

    python benchmarks/start_up.py --limits 600 600 -- --device cpu
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_specdec.benchmarking.environment import environment
from hf_specdec.loading import default_device
from hf_specdec.smollm2 import smollm2_folder


_LINE = re.compile(r"\[ *([0-9.]+) s\] (.*)")
_PART = re.compile(r"(?:engine, \d+ ms: )?((?:Captured|Compiled) .*): ([0-9.]+) s\b")
_MOST_PARTS = 10
_ENDS = "ended"


def start(folder: Path, arguments: list[str], most_seconds: float) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """
    Starts a server and ends it.

    Returns:
        `tuple`: seconds from the start of the process to each event, in order; and those that each compiled piece and
        captured graph took.

    Raises:
        RuntimeError: if it is not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "hf_specdec.cli",
        "serve",
        "--verbose",
        "--compile",
        "--compile-cache",
        str(folder),
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    began, found = time.perf_counter(), dict[str, float]()
    parts = list[tuple[str, float]]()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def read() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            sys.stderr.write(line)
            if (stage := _LINE.match(line)) is not None:
                found[stage[2]] = time.perf_counter() - began
            if (part := _PART.match(line)) is not None:
                parts.append((part[1], float(part[2])))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while (status := _status(f"http://127.0.0.1:{port}/health")) != 200:
            if status is not None:
                found.setdefault("listens", time.perf_counter() - began)
            if server.poll() is not None or time.perf_counter() - began > most_seconds:
                _tell_slowest(parts)
                raise RuntimeError(f"The server is not ready: {' '.join(command)}")
            time.sleep(0.05)
        found["/health is ready"] = time.perf_counter() - began
        if _status(f"http://127.0.0.1:{port}/v1/completions", {"prompt": "Hello", "max_tokens": 1}) != 200:
            raise RuntimeError("The first request failed.")
        found["first token"] = time.perf_counter() - began
    finally:
        ending = time.perf_counter()
        server.send_signal(signal.SIGINT)
        server.wait(60)
        reader.join()
        found[_ENDS] = time.perf_counter() - ending
    return found, parts


def _tell_slowest(parts: list[tuple[str, float]]) -> None:
    """Prints the pieces and graphs that took longest, and the seconds of all of either kind."""
    for part, seconds in sorted(parts, key=lambda one: -one[1])[:_MOST_PARTS]:
        print(f"{seconds:8.2f} s  {part}")
    for kind in ("Compiled", "Captured"):
        own = [seconds for part, seconds in parts if part.startswith(kind)]
        print(f"{sum(own):8.2f} s  {kind} {len(own)} in all")


def _status(address: str, body: dict[str, object] | None = None) -> int | None:
    """Status of an answer; None where nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--starts", type=int, default=2, help="number of starts, one after the other")
    parser.add_argument("--limits", type=float, nargs="+", default=[60, 20], help="most seconds, first and later ones")
    parser.add_argument("--most-seconds", type=float, default=900, help="after which a start is given up")
    parser.add_argument("arguments", nargs="*", help="further arguments of `hf-specdec serve`")
    options = parser.parse_args()
    if "--compile-cache" in options.arguments:
        parser.error("--compile-cache is chosen here: an empty folder.")
    smollm2_folder()  # converted once
    with tempfile.TemporaryDirectory() as place:
        found = [start(Path(place), options.arguments, options.most_seconds) for _ in range(options.starts)]
        size = sum(Path(at, name).stat().st_size for at, _, names in os.walk(place) for name in names)
    starts = [events for events, _ in found]
    table = Table("event", *(f"start {number}" for number in range(1, len(starts) + 1)), title="seconds")
    for event in dict.fromkeys(event for one in starts for event in one):
        table.add_row(event, *(f"{one[event]:.1f}" if event in one else "" for one in starts))
    Console(width=119).print(table)
    for number, (_, parts) in enumerate(found, 1):
        print(f"start {number}, slowest parts of the whole:")
        _tell_slowest(parts)
    print(f"compiled code: {size / 2**20:.1f} MiB")
    limits = [*options.limits, *options.limits[-1:] * len(starts)][: len(starts)]
    fits = [one["/health is ready"] <= limit for one, limit in zip(starts, limits, strict=True)]
    for number, (one, limit) in enumerate(zip(starts, limits, strict=True), 1):
        print(f"start {number}: ready after {one['/health is ready']:.1f} s, limit {limit:g} s")
    print(
        json.dumps({"starts": starts, "bytes": size, "limits": limits, "environment": environment(default_device())})
    )
    sys.exit(0 if all(fits) else 1)


if __name__ == "__main__":
    main()
