"""
A server under load: throughput and latency with speculation, without, and of `transformers serve`.

    python benchmarks/serving_load.py [--target ID_OR_FOLDER] [--draft ngram] [--tree auto] [--concurrency 1 8 64]

Each server runs in a process of its own, one after the other, and gets the same requests: random text of
`--input-len` tokens (or the built-in prompts, with `--prompts real`), `--output-len` tokens each whatever they say,
all at once (request rate inf) but no more than `--concurrency` open at a time. Measured by the client, over streams:

- TTFT: time to the first token; TPOT: time per token after the first; ITL: time between two pieces of text.
- Acceptance, from the server's own counters.

(Without HTTP, and with fewer packages: manager_load.py.)

A first round of requests warms up and does not count. Prints a table, then one JSON line. A trial on a CPU:

    python benchmarks/serving_load.py --concurrency 1 4 --input-len 40 --output-len 20 --temperature 0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from load import sweep_parser
from load_figures import Timing, add_row, new_table, summary
from rich.console import Console
from transformers import AutoTokenizer

from hf_specdec.benchmarking import prompts as prompt_sets
from hf_specdec.benchmarking.environment import environment
from hf_specdec.smollm2 import smollm2_folder


# ------------------------------------------------------------------------------------------------------------- servers


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command that starts each contender's server, without host and port."""
    ours = [sys.executable, "-m", "hf_specdec.cli", "serve", options.target]
    ours += ["--device", options.device, "--dtype", options.dtype, "--max-requests", str(options.max_requests)]
    ours += ["--no-enable-prefix-caching"]  # rounds repeat their prompts
    if options.compile:
        ours += ["--compile"]
    if options.num_blocks is not None:
        ours += ["--num-blocks", str(options.num_blocks)]
    speculating = [*ours, "--draft", options.draft, "--tree", options.tree]
    if options.disable_by_batch_size is not None:
        speculating += ["--disable-by-batch-size", str(options.disable_by_batch_size)]
    theirs = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", options.target]
    theirs += ["--continuous-batching", "--device", options.device, "--dtype", options.dtype]
    return {
        "speculating": speculating,
        "plain": [*ours, "--disable-by-batch-size", "0"],
        "transformers": theirs,
    }


@contextmanager
def running(command: list[str]) -> Iterator[str]:
    """Runs a server inside the context; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
        address = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + 600
            while read(f"{address}/health") is None:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{' '.join(command)} did not start.")
                time.sleep(0.2)
            yield address
        except Exception:  # raised again after the log is printed, which is lost otherwise
            log.seek(0)
            print(f"{' '.join(command)} said at last:\n{log.read()[-8000:]}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)


def read(address: str) -> str | None:
    """The body of a GET response; None if there is no server or no such page."""
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            return response.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return None


def counters(address: str) -> dict[str, float]:
    """The server's counters of speculation, those by position included; empty for a server without them."""
    found = {}
    for line in (read(f"{address}/metrics") or "").splitlines():
        name, _, value = line.rpartition(" ")
        if not name.startswith("vllm:spec_decode_"):
            continue
        key = name.removeprefix("vllm:spec_decode_").split("{")[0].removesuffix("_total")
        if 'position="' in name:
            key += "_" + name.split('position="')[1].split('"')[0]
        found[key] = float(value)
    return found


# ------------------------------------------------------------------------------------------------------------ requests


def client_of(address: str) -> openai.AsyncOpenAI:
    """A client of a server, which does not try again."""
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=None)


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, temperature: float, length: int) -> Timing:
    """Times one request. Events are parsed here, because the client would create an object for each."""
    generation = {"max_new_tokens": length, "eos_token_id": -1, "do_sample": temperature > 0, "top_k": 0}
    start, pieces, tokens, unread = time.perf_counter(), [], 0, b""
    async with client.completions.with_streaming_response.create(
        model=model,
        prompt=prompt,
        max_tokens=length,
        temperature=temperature,
        stream=True,
        extra_body={"generation_config": json.dumps(generation)},
    ) as response:
        async for part in response.iter_bytes():
            *events, unread = (unread + part).split(b"\n\n")
            now = time.perf_counter() - start
            for event in events:
                data = event.removeprefix(b"data: ")
                chunk = {"choices": []} if data == b"[DONE]" else json.loads(data)
                if "choices" not in chunk:
                    raise RuntimeError(f"A request ended with {chunk}.")
                if any(choice["text"] for choice in chunk["choices"]):
                    pieces.append(now)
                if chunk.get("usage") is not None:
                    tokens = chunk["usage"]["completion_tokens"]
    if not pieces or tokens == 0:
        raise RuntimeError(f"A request came back without text: {prompt[:60]!r}")
    return Timing(tokens, pieces)


async def load(
    address: str, model: str, prompts: list[str], temperature: float, length: int, concurrency: int
) -> tuple[float, list[Timing]]:
    """Sends all prompts, at most `concurrency` at a time; returns the seconds taken and every request's timing."""
    client = client_of(address)
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: str) -> Timing:
        async with places:
            return await ask(client, model, prompt, temperature, length)

    start = time.perf_counter()
    timings = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - start
    await client.close()
    return seconds, timings


def texts(options: argparse.Namespace, count: int) -> list[str]:
    """The texts of `count` prompts, equal for every contender."""
    if options.prompts == "real":
        built_in = [prompt.text for prompt in prompt_sets.built_in()]
        return [built_in[number % len(built_in)] for number in range(count)]
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    choice = random.Random(0)
    special = set(tokenizer.all_special_ids)
    tokens = [token for token in range(tokenizer.vocab_size) if token not in special]
    return [tokenizer.decode(choice.choices(tokens, k=options.input_len)) for _ in range(count)]


# ---------------------------------------------------------------------------------------------------------------- all


def main() -> None:
    parser = sweep_parser(__doc__, ("speculating", "plain", "transformers"))
    parser.set_defaults(target=str(smollm2_folder()), draft="ngram", tree="auto", max_requests=128)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    table = new_table()
    for contender in options.contenders:
        with running(commands(options)[contender]) as address:
            for temperature in options.temperature:
                for concurrency in options.concurrency:
                    prompts = texts(options, max(4, concurrency * options.requests_per_place))
                    call = (temperature, options.output_len, concurrency)
                    asyncio.run(load(address, options.target, prompts[: min(concurrency, 8)], *call))  # warms up
                    before = counters(address)
                    seconds, timings = asyncio.run(load(address, options.target, prompts, *call))
                    figures = summary(seconds, timings, before, counters(address))
                    results.append(
                        {"contender": contender, "temperature": temperature, "concurrency": concurrency} | figures
                    )
                    add_row(table, results[-1])
                    print(json.dumps(results[-1]), file=sys.stderr)
    Console().print(table)
    print(json.dumps({**environment(options.device), **vars(options), "results": results}))


if __name__ == "__main__":
    main()
