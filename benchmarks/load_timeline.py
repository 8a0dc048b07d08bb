"""
What the device does while a manager serves many requests of a large model, and how long it rests.

    python benchmarks/load_timeline.py [--concurrency 64] [--contenders plain tree] [--compile]

The target is a random model of the shape of Llama-3.1-8B in bfloat16, with prompts of 512 random tokens and 128 new
ones each. First the load runs by itself: tokens per second of each round. Then a part of it runs under torch's
profiler, once while prompts are read and once while tokens are written: the time that kernels take, the gaps between
them and the kernels before which the device rests, and the kernels that take longest. Under the profiler the host
launches more slowly, so gaps are longer than in the rounds. Prints lines, then one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from load import Load, load_models, prompts_of, running_manager, sampling_at, sweep_parser
from torch.profiler import ProfilerActivity, profile

from hf_specdec.benchmarking.environment import environment


SHORTEST_GAP = 30
"""Microseconds."""
PARTS = {"prompts": (0.0, 0.35), "tokens": (1.2, 0.25)}
"""Seconds after the load has begun, and seconds of the profile."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or a copy. Times are in microseconds."""

    start: float
    took: float
    name: str


def kernels_of(run: Callable[[], None]) -> list[Kernel]:
    """Everything that the device does during a call, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    wanted = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted((Kernel(one["ts"], one["dur"], one["name"]) for one in wanted), key=lambda one: one.start)


def report(title: str, kernels: list[Kernel]) -> dict[str, Any]:
    """Prints and returns how long the device worked and rested, in milliseconds."""
    end, busy = kernels[0].start, 0.0
    gaps, took = defaultdict[str, float](float), defaultdict[str, float](float)
    for kernel in kernels:
        if kernel.start - end > SHORTEST_GAP:
            gaps[kernel.name] += kernel.start - end
        last = kernel.start + kernel.took
        busy += max(0.0, last - max(kernel.start, end))
        end = max(end, last)
        took[kernel.name] += kernel.took
    span = end - kernels[0].start
    print(f"{title}: {span / 1e3:.1f} ms, {busy / span:.1%} of them in {len(kernels)} kernels")
    for heading, found in (("rests before", gaps), ("takes longest", took)):
        for name, microseconds in heapq.nlargest(12, found.items(), key=lambda item: item[1]):
            print(f"  {heading} {microseconds / 1e3:9.2f} ms  {name[:90]}", flush=True)
    return {"span": span / 1e3, "busy": busy / 1e3, "gaps": sum(gaps.values()) / 1e3, "kernels": len(kernels)}


def main() -> None:
    parser = sweep_parser(__doc__, ("plain", "tree", "auto"))
    parser.set_defaults(
        target="pair:0.03", tree="chain:5", input_len=512, output_len=128, concurrency=[64], contenders=["plain"]
    )
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device.")
    model, draft = load_models(options)
    found: list[dict[str, Any]] = []
    for contender in options.contenders:
        for places in options.concurrency:
            found.append({"contender": contender, "open": places} | timeline(contender, model, draft, places, options))
    print(json.dumps({"results": found, **environment("cuda")}))


def timeline(contender: str, model: Any, draft: Any, places: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one contender at one load."""
    prompts, sampling = prompts_of(options, model.config.vocab_size, places), sampling_at(0.0)
    rates: list[float] = []
    with running_manager(contender, model, draft, 0.0, options) as manager:

        def begin() -> Load:
            load = Load(manager, [(prompt, options.output_len) for prompt in prompts], **sampling)
            load.fill(places)
            return load

        def take(load: Load, seconds: float = 600.0) -> None:
            last = time.perf_counter() + seconds
            while load.open and time.perf_counter() < last:
                load.take(0.01)

        take(begin())
        for _ in range(options.rounds):
            start = time.perf_counter()
            take(begin())
            rates.append(places * options.output_len / (time.perf_counter() - start))
            print(f"{contender}, {places} open: {rates[-1]:,.0f} tokens/s", flush=True)
        parts: dict[str, Any] = {}
        for part, (wait, seconds) in PARTS.items():
            load = begin()
            take(load, wait)
            kernels = kernels_of(partial(take, load, seconds))
            take(load)
            if kernels:
                parts[part] = report(f"{contender}, {places} open, {part}", kernels)
    return {"tokens_per_second": rates, "parts": parts}


if __name__ == "__main__":
    main()
