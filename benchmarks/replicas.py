"""
Replicas of the server under a local Ray: tokens per second of one, and of two with a thread each.

    python benchmarks/replicas.py [--replicas 1 2] [--requests 24] [--output-len 64] [--cpus 1]

The built-in prompts are asked for whole, `--concurrency` at a time for each replica, after a round that warms up. Run
it on a machine that does nothing else. Prints a line for each number of replicas, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from hf_specdec.benchmarking import prompts as prompt_sets
from hf_specdec.benchmarking.environment import environment


EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_serve.py"
SECONDS_TO_START = 600


@contextmanager
def server(number: int, options: argparse.Namespace) -> Iterator[str]:
    """The address of the example with so many replicas."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), "--replicas", str(number), "--cpus", str(options.cpus)]
    command += ["--gpus", str(options.gpus), "--draft", options.draft, "--tree", options.tree, "--port", str(port)]
    if options.target is not None:
        command += ["--target", options.target]
    if options.num_blocks is not None:
        command += ["--num-blocks", str(options.num_blocks)]
    threads = {"OMP_NUM_THREADS": str(max(int(options.cpus), 1)), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | threads)
        try:
            until, told = time.monotonic() + SECONDS_TO_START, ""
            while "(Ctrl-C ends)" not in told:
                log.seek(0)
                told = log.read()
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(told[-4000:])
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


async def tokens_per_second(address: str, concurrency: int, options: argparse.Namespace) -> float:
    """Tokens of all answers, divided by the time from the first request to the last answer."""
    texts = [prompt.text for prompt in prompt_sets.built_in(prompt_sets.TASKS, 20)]
    client = openai.AsyncOpenAI(base_url=address, api_key="none", timeout=600)
    places = iter(range(options.requests))

    async def ask_some() -> int:
        written = 0
        for place in places:
            answer = await client.chat.completions.create(
                model=None,
                messages=[{"role": "user", "content": texts[place % len(texts)]}],
                max_tokens=options.output_len,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            written += answer.usage.completion_tokens
        return written

    async with client:
        began = time.perf_counter()
        written = await asyncio.gather(*(ask_some() for _ in range(concurrency)))
        return sum(written) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub id or folder; default: SmolLM2-135M-Instruct from a package")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--tree", default="default")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cpus", type=float, default=1, help="threads of a replica")
    parser.add_argument("--gpus", type=float, default=0, help="of a replica")
    parser.add_argument("--num-blocks", type=int, default=None)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4, help="open requests for each replica")
    options = parser.parse_args()
    found: dict[int, float] = {}
    for number in options.replicas:
        with server(number, options) as address:
            asyncio.run(tokens_per_second(address, number * options.concurrency, options))
            found[number] = asyncio.run(tokens_per_second(address, number * options.concurrency, options))
        told = f"{number} replicas: {found[number]:.1f} tokens per second"
        print(f"{told}, {found[number] / found[options.replicas[0]]:.2f} x", flush=True)
    print(json.dumps({"tokens_per_second": found, "environment": environment("cuda" if options.gpus else "cpu")}))


if __name__ == "__main__":
    main()
