"""
Many requests under load on a device that only takes time: what the host's part costs, measured without a GPU.

    python benchmarks/host_time.py [--concurrency 1 8 64] [--rounds 5]

Scheduling, results and launches are real, and so is the thread that adds requests and takes results. But no captured
step runs: each occupies the stand-in for the device as long as it took SmolLM2-135M-Instruct on an H200 (`DECODING`,
`PREFILL`), and all tokens are equal. The two contenders are our manager without a draft model ("plain") and with an
EAGLE head whose speculation is off ("off"). Both get the same times, so that they differ by the host's work alone
(only steps in which the head catches up are assumed to take a twentieth longer, see `READING`). "Idle" is the share of
the time in which the device has nothing to do although requests are open. Host times depend on the CPU: compare
contenders and commits on one machine. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from load import HEAD, put_load, wait_for_none
from load_figures import summary
from rich.console import Console
from rich.table import Table

from hf_specdec import NgramDraft, SpeculativeConfig, graphs, kernels, loading
from hf_specdec.batching import Limits
from hf_specdec.benchmarking.environment import environment
from hf_specdec.engine.captured.captured import CapturedStep
from hf_specdec.engine.captured.prompt_step import PromptReport, PromptStep
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.serving.interpreter import let_steps_go_first


DECODING = {1: 2.88, 2: 3.05, 4: 3.13, 8: 3.20, 16: 3.28, 32: 3.42, 64: 3.53}
"""Milliseconds of a decoding step without drafts, by number of rows."""
PREFILL = {1: 4.98, 2: 6.53, 4: 10.4, 8: 17.5}
"""Milliseconds of a prefill step, by number of prompts of 1,000 tokens; no step reads more than eight."""
READING = 1.05
"""How many times as long a decoding step takes in which the head catches up: assumed, not measured."""


class Device:
    """Runs what is launched one after the other, which takes time and nothing else."""

    def __init__(self) -> None:
        self.free_at = self.idle = 0.0
        """When the last work ends (`time.perf_counter`); seconds without work since `begin`."""

    def begin(self) -> None:
        """Starts a measurement."""
        self.free_at, self.idle = time.perf_counter(), 0.0

    def launch(self, milliseconds: dict[int, float], rows: int, factor: float = 1.0) -> float:
        """Launches a step of so many rows; returns when it ends."""
        now = time.perf_counter()
        self.idle += max(now - self.free_at, 0.0)
        sizes = sorted(milliseconds)
        size = sizes[min(bisect.bisect_left(sizes, rows), len(sizes) - 1)]
        self.free_at = max(now, self.free_at) + factor * milliseconds[size] / 1e3
        return self.free_at


class Report:
    """The report of a prefill step, which can be read when the step has ended."""

    def __init__(self, end: float, rows: int):
        self._end, self._rows = end, rows

    def read(self) -> list[list[int]]:
        wait_until(self._end)
        return [[0, 0, 7]] * self._rows


def wait_until(end: float) -> None:
    time.sleep(max(end - time.perf_counter(), 0.0))


@contextmanager
def without_computing(device: Device) -> Iterator[None]:
    """Lets captured steps run on the stand-in for a device."""
    ends: dict[InFlightStep, deque[float]] = {}

    def load(step: InFlightStep, *arguments: Any) -> None:
        ends[step] = deque()
        CapturedStep.load(step, *arguments)

    def launch(step: InFlightStep) -> None:
        step.launched_at = time.perf_counter()
        ends[step].append(device.launch(DECODING, step.rows.size.rows, READING if step.kind.reads else 1.0))

    def report(step: InFlightStep) -> list[list[int]]:
        wait_until(ends[step].popleft())
        return [[0, 0, 0, 0, 7] for _ in range(step.rows.size.rows)]

    def launch_prompts(step: PromptStep) -> Any:
        report: Any = Report(device.launch(PREFILL, step.rows.size.rows), step.rows.size.rows)
        return PromptReport(report)

    with ExitStack() as stack:
        for kind, name, instead in (
            (InFlightStep, "load", load),
            (InFlightStep, "launch", launch),
            (InFlightStep, "report", report),
            (PromptStep, "launch", launch_prompts),
        ):
            stack.enter_context(mock.patch.object(kind, name, instead))
        captures = {"cpu": lambda run, device, pool=None: ((lambda: None), [])}
        stack.enter_context(mock.patch.dict(graphs.RECORDERS, captures))
        stack.enter_context(mock.patch.dict(kernels.DEVICES, {"cpu": (torch.float32,)}))
        yield


def measure(
    manager: Any, device: Device, prompts: list[list[int]], concurrency: int, options: argparse.Namespace
) -> dict[str, float]:
    """Puts a load on a manager; returns its throughput, mean latencies, and the share of time with an idle device."""
    device.begin()
    end = time.perf_counter() + 600
    outcome = put_load(manager, prompts, options.output_len, concurrency, end, {"do_sample": False}, True)
    idle, figures = device.idle / outcome.seconds, summary(outcome.seconds, outcome.timings, {}, {})
    wait_for_none(manager)
    return {
        "tokens_per_second": figures["tokens_per_second"],
        "idle": idle,
        "ttft_ms": figures["ttft_ms"]["mean"],
        "itl_ms": figures["itl_ms"]["mean"],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=200, help="on average: from half to one and a half as many")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    model = loading.load_target(None, torch.float32, "cpu")
    drafts = {"plain": NgramDraft(), "off": loading.load_draft_to(str(HEAD), torch.float32, "cpu")}
    let_steps_go_first()  # as `hf-specdec serve` does
    most = max(options.concurrency)
    choice, device = random.Random(0), Device()
    prompts = [choice.choices(range(5, model.config.vocab_size), k=1000) for _ in range(max(2 * most, 4))]
    limits = Limits(num_blocks=(most + 1) * (1000 + 2 * options.output_len) // 32, max_requests=most, chunk_size=8192)
    config = SpeculativeConfig(tree="[(0,),(0,0)]", disable_by_batch_size=0, cuda_graphs=True)
    table = Table("open", "contender", "tok/s", "of plain", "idle", "TTFT ms", "ITL ms")
    results: list[dict[str, Any]] = []
    with without_computing(device), ExitStack() as stack:
        managers = {}
        for name, draft in drafts.items():
            managers[name] = manager = model.init_continuous_batching(
                assistant_model=draft, speculative_config=config, continuous_batching_config=limits
            )
            stack.callback(manager.stop, hard_stop=True)
            manager.start()
            put_load(manager, [[5, 6, 7]], 2, 1, time.perf_counter() + 600)  # takes memory for K/V and features
            manager.engine.device_steps.prompts.captures_at_once = True
        for concurrency in options.concurrency:
            own = prompts[: max(2 * concurrency, 4)]
            rounds: list[dict[str, dict[str, float]]] = [
                {name: measure(manager, device, own, concurrency, options) for name, manager in managers.items()}
                for _ in range(options.rounds + 1)
            ][1:]  # in the first, sizes are captured as they come
            plain = statistics.median(one["plain"]["tokens_per_second"] for one in rounds)
            for name in managers:
                found = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
                found["of_plain"] = found["tokens_per_second"] / plain
                results.append({"concurrency": concurrency, "contender": name} | found)
                table.add_row(
                    str(concurrency),
                    name,
                    f"{found['tokens_per_second']:.0f}",
                    f"{found['of_plain']:.3f}",
                    f"{100 * found['idle']:.1f} %",
                    f"{found['ttft_ms']:.1f}",
                    f"{found['itl_ms']:.2f}",
                )
    Console().print(table)
    print(json.dumps({**environment("cpu"), **vars(options), "results": results}))


if __name__ == "__main__":
    main()
