"""
Speculation under a load that rises and falls: when it goes, whether it comes back, and what it accepts then.

    python benchmarks/load_switch.py [--target ID_OR_FOLDER] [--draft ID_OR_FOLDER] [--limit 16] [--output switch.png]

So many requests as `--open` says are open at a time, each number for `--phase-seconds`, with texts of two, three and
four thirds of `--output-len`; those that are too many when the load falls end by themselves. The same load is put on
three managers: one that switches speculation off with more than `--limit` running requests, one that never speculates
and one that always does. The picture shows, over time, the running requests, the tokens per second of all three, and
the acceptance of the first, whose steps without drafts are shaded. Prints, for every phase, the throughput and the
mean acceptance length, then one JSON line. The defaults need no network, and take five phases of 15 seconds on each
of three managers. A trial on a CPU:

    python benchmarks/load_switch.py --open 1 6 1 --limit 2 --phase-seconds 6 --output-len 24 --tree chain:3
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from load import Load, load_models, load_parser, prompts_of, running_manager
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_specdec.benchmarking.environment import environment


matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


WAYS = {"by load": None, "never": 0, "always": sys.maxsize}
"""Value of `disable_by_batch_size` by manager: with more running requests it does not speculate; None: `--limit`."""


@dataclass(frozen=True)
class Sample:
    """
    A manager's activity since the previous sample (`speculates`: whether any step had a draft), and its number of
    requests. `time` is in seconds from the start.
    """

    time: float
    phase: int
    running: int
    waiting: int
    speculates: bool
    tokens_per_second: float
    drafts: int
    accepted: int

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step with a draft; None if no step had one."""
        return 1 + self.accepted / self.drafts if self.drafts else None


def put_load(manager: Any, prompts: list[list[int]], options: argparse.Namespace) -> list[Sample]:
    """Keeps each phase's number of requests open, and samples the manager's state every `--interval` seconds."""
    samples: list[Sample] = []
    thirds = (options.output_len * (2 + number % 3) // 3 for number in itertools.count())  # equal ones end at once
    load, start = Load(manager, zip(itertools.cycle(prompts), thirds, strict=False)), time.perf_counter()
    looked, before = start, manager.state
    counts = before.speculation.num_drafts, before.speculation.num_accepted_tokens
    while (phase := int((time.perf_counter() - start) / options.phase_seconds)) < len(options.open):
        load.fill(options.open[phase])
        load.take(timeout=options.interval / 4)
        now = time.perf_counter()
        if now - looked < options.interval:
            continue
        state = manager.state
        new_counts = state.speculation.num_drafts, state.speculation.num_accepted_tokens
        samples.append(
            Sample(
                time=now - start,
                phase=phase,
                running=state.num_running,
                waiting=state.num_waiting,
                speculates=new_counts[0] > counts[0],
                tokens_per_second=(state.num_generation_tokens - before.num_generation_tokens) / (now - looked),
                drafts=new_counts[0] - counts[0],
                accepted=new_counts[1] - counts[1],
            )
        )
        looked, before, counts = now, state, new_counts
    return samples


def run(way: str, model: PreTrainedModel, draft: Any, options: argparse.Namespace) -> list[Sample]:
    """Puts the load on one manager; returns the samples."""
    own = argparse.Namespace(**vars(options))
    own.disable_by_batch_size = options.limit if WAYS[way] is None else WAYS[way]
    prompts = prompts_of(options, model.config.get_text_config().vocab_size, 64)
    with running_manager("tree", model, draft, options.temperature, own) as manager:
        names = [manager.add_request(prompt, max_new_tokens=8) for prompt in prompts[: max(options.open)]]
        for name in names:  # warms up
            manager.get_result(name)
        return put_load(manager, prompts, options)


def by_phase(samples: list[Sample], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of every phase, without its first quarter, in which requests of the previous phase end."""
    figures = []
    for phase, wanted in enumerate(options.open):
        start = (phase + 0.25) * options.phase_seconds
        inside = [sample for sample in samples if sample.phase == phase and sample.time >= start]
        drafts, accepted = sum(s.drafts for s in inside), sum(s.accepted for s in inside)
        figures.append(
            {
                "open": wanted,
                "tokens_per_second": statistics.median([s.tokens_per_second for s in inside] or [0.0]),
                "acceptance_length": 1 + accepted / drafts if drafts else None,
                "share_with_speculation": statistics.mean([s.speculates for s in inside] or [0.0]),
            }
        )
    return figures


def plot(found: dict[str, list[Sample]], options: argparse.Namespace) -> None:
    """Draws running requests, throughput and acceptance over time into `--output`."""
    figure, (requests, throughput, acceptance) = plt.subplots(3, sharex=True, figsize=(9, 8), layout="constrained")
    switching = found["by load"]
    times = [sample.time for sample in switching]
    requests.step(times, [sample.running for sample in switching], where="pre", color="black")
    requests.axhline(options.limit + 0.5, linestyle=":", color="gray", label=f"more than {options.limit}: no drafts")
    requests.set_ylabel("running requests")
    requests.legend(loc="upper right")
    for (way, samples), style in zip(found.items(), ("-", "--", ":"), strict=True):
        rates = [sample.tokens_per_second for sample in samples]
        throughput.plot([sample.time for sample in samples], rates, style, label=f"speculates {way}")
    throughput.set_ylabel("tokens per second")
    throughput.legend(loc="upper right")
    lengths = [sample.acceptance_length for sample in switching]
    acceptance.plot(times, [float("nan") if length is None else length for length in lengths], ".-")
    acceptance.set_ylabel("mean acceptance length")
    acceptance.set_xlabel("seconds")
    for axis in (requests, throughput, acceptance):
        for before, sample in zip([0.0, *times], switching, strict=False):
            if not sample.speculates:
                axis.axvspan(before, sample.time, color="gray", alpha=0.15, linewidth=0)
    figure.savefig(options.output, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = load_parser(__doc__)
    parser.add_argument("--limit", type=int, default=16, help="with more running requests, steps carry no drafts")
    parser.add_argument("--open", nargs="+", type=int, default=[2, 8, 64, 8, 2], help="requests, for each phase")
    parser.add_argument("--phase-seconds", type=float, default=15.0)
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two looks")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output", type=Path, default=Path("load_switch.png"))
    parser.set_defaults(prompts="real", input_len=200, output_len=200)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    model, draft = load_models(options)
    found = {way: run(way, model, draft, options) for way in WAYS}
    plot(found, options)
    table = Table("speculates", "open", "tok/s", "acceptance length", "time with speculation")
    phases = {way: by_phase(samples, options) for way, samples in found.items()}
    for way, figures in phases.items():
        for phase in figures:
            length = phase["acceptance_length"]
            table.add_row(
                way,
                str(phase["open"]),
                f"{phase['tokens_per_second']:.1f}",
                "" if length is None else f"{length:.2f}",
                f"{phase['share_with_speculation']:.0%}",
            )
    Console().print(table)
    samples = {way: [asdict(sample) for sample in found[way]] for way in found}
    described = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    print(json.dumps({**environment(options.device), **described, "phases": phases, "samples": samples}))


if __name__ == "__main__":
    main()
