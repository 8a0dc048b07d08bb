"""
A server under large bodies: how its streams go on meanwhile.

    python benchmarks/large_bodies.py [--streams 20] [--output-len 60] [--rounds 3] [--device cuda]

Streams run twice, first alone and then while 12 large bodies come, one after the other: of 50 MB down to 500 kB, as
text, as values, nested, with escapes, without a `Content-Length`. Measured by the client:

- the gaps between two pieces of a stream: their 99th percentile and the longest;
- the seconds from the beginning of a body to its answer.

To reach: a body of 50 MB is refused within 0.2 seconds; the percentile is at most twice that of the streams alone, and
no gap is longer than half a second. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from serving_load import ask, client_of, running

from hf_specdec.benchmarking.environment import environment
from hf_specdec.loading import default_device
from hf_specdec.smollm2 import smollm2_folder


MB = 10**6


def bodies() -> dict[str, tuple[bytes, bool]]:
    """Large bodies by name, and whether each says its length."""

    def prompt(text: str) -> bytes:
        return json.dumps({"prompt": text, "max_tokens": 1}).encode()

    chat = {"messages": [{"role": "user", "content": "word " * 100_000}], "max_tokens": 1}
    return {
        "50 MB of text": (prompt("word " * (10 * MB)), True),
        "50 MB in chunks": (prompt("word " * (10 * MB)), False),
        "20 MB of lists": (b'{"prompt": [' + b"[]," * (20 * MB // 3) + b"0]}", True),
        "4 MB of one letter": (prompt("a" * (4 * MB)), True),
        "4 MB of lists": (b'{"prompt": [' + b"[]," * (4 * MB // 3) + b"0]}", True),
        "4 MB of numbers": (b'{"prompt": [' + b"1e9," * MB + b"0]}", True),
        "4 MB of escapes": (prompt("é" * (4 * MB // 6)), True),
        "4 MB of quotes": (prompt('"' * (2 * MB - 100)), True),
        "1 MB nested": (b'{"prompt": ' + b"[" * MB, True),
        "600 kB of spaces": (prompt(" " * 600_000), True),
        "600 kB of one letter": (prompt("a" * 600_000), False),
        "500 kB of chat": (json.dumps(chat).encode(), True),
    }


async def sent(host: str, port: int, path: str, body: bytes, says_length: bool) -> tuple[Any, Any]:
    """Sends a request, while its answer may come already; returns reader and writer."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    length = f"Content-Length: {len(body)}" if says_length else "Transfer-Encoding: chunked"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    writer.write(head.encode())

    async def write() -> None:
        step = 2**16
        for at in range(0, len(body), step):
            part = body[at : at + step]
            writer.write(part if says_length else b"%x\r\n" % len(part) + part + b"\r\n")
            await writer.drain()
        if not says_length:
            writer.write(b"0\r\n\r\n")

    writer.task = asyncio.ensure_future(write())
    return reader, writer


async def answer(host: str, port: int, body: bytes, says_length: bool) -> tuple[int, float]:
    """Status of the answer, and the seconds until it comes."""
    begun = time.perf_counter()
    path = "/v1/chat/completions" if b'"messages"' in body[:100] else "/v1/completions"
    reader, writer = await sent(host, port, path, body, says_length)
    line = await asyncio.wait_for(reader.readline(), 120)
    seconds = time.perf_counter() - begun
    writer.task.cancel()
    writer.close()
    return int(line.split()[1]), seconds


async def measured(
    host: str, port: int, target: str, streams: int, length: int, large: dict[str, Any]
) -> dict[str, Any]:
    """Runs streams, with large bodies one after the other as long as the streams last."""
    client = client_of(f"http://{host}:{port}")
    prompts = [f"Number {number} is a number that" for number in range(streams)]
    running = [asyncio.ensure_future(ask(client, target, prompt, 0.0, length)) for prompt in prompts]
    await asyncio.sleep(1)
    answers = {name: await answer(host, port, *body) for name, body in large.items()}
    is_covered = not any(one.done() for one in running)
    gaps = sorted(gap for timing in await asyncio.gather(*running) for gap in timing.itl)
    await client.close()
    return {
        "gaps": len(gaps),
        "p99": gaps[int(0.99 * len(gaps))],
        "longest": gaps[-1],
        "answers": answers,
        "streams_outlast": is_covered,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=None)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--output-len", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default=default_device(), help="of the server's model")
    options = parser.parse_args()
    target = options.target or str(smollm2_folder())
    command = [sys.executable, "-m", "hf_specdec.cli", "serve", target]
    large, rounds = bodies(), []
    with running([*command, "--device", options.device, "--disable-by-batch-size", "4"]) as address:
        host, port = address.removeprefix("http://").split(":")
        of_streams = host, int(port), target, options.streams, options.output_len
        asyncio.run(measured(host, int(port), target, 2, 8, {}))  # warms up
        for _ in range(options.rounds):
            alone, beside = (asyncio.run(measured(*of_streams, given)) for given in ({}, large))
            rounds.append({"alone": alone, "beside": beside})
    table = Table("streams", "gaps", "p99, s", "longest, s")
    for one in rounds:
        for name, figures in one.items():
            table.add_row(name, f"{figures['gaps']}", f"{figures['p99']:.3f}", f"{figures['longest']:.3f}")
    Console().print(table)
    table = Table("body", "status", "seconds")
    for name, (status, seconds) in rounds[-1]["beside"]["answers"].items():
        table.add_row(name, f"{status}", f"{seconds:.3f}")
    Console().print(table)
    print(json.dumps({"rounds": rounds, "options": vars(options), "environment": environment("cpu")}))


if __name__ == "__main__":
    main()
