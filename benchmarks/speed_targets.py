"""
The speed targets of the project: measures them and prints them in a table.

    python benchmarks/speed_targets.py [--target ID_OR_FOLDER] [--draft HEAD] [--only P1,P3]

docs/benchmarking.md says what each target is and how it is measured. Exits with 1 if one failed. The last line is
JSON. A trial on tiny models, whose figures say nothing:

    python benchmarks/speed_targets.py --tiny --device cpu
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import suite
import torch
from rich.console import Console
from rich.table import Column, Table
from suite import GOALS, TARGETS, Entry, Options
from transformers.utils import logging

from hf_specdec.benchmarking.environment import environment
from hf_specdec.loading import default_device


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="of P4 and P8; default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="head of P4 and P8, which are left out without one")
    parser.add_argument("--only", type=names_of, default=tuple(TARGETS), help="some of the targets, such as P1,P3")
    parser.add_argument("--tiny", action="store_true", help="a trial on tiny models, by default of 1 round")
    parser.add_argument("--rounds", type=int, help="timed calls with each prompt (default: 3)")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--threads", type=int, help="of PyTorch on a CPU")
    parser.add_argument("--profile", type=Path, help="folder for profiler traces")
    options = parser.parse_args(words)
    if not options.device.startswith("cuda") and not options.tiny:
        parser.error(
            f"the targets need a CUDA device, and this would run on {options.device!r}. Run it on a machine with a "
            "GPU, or try the code out with --tiny."
        )
    if options.rounds is None:
        options.rounds = 1 if options.tiny else 3
    return options


def names_of(text: str) -> tuple[str, ...]:
    """The targets named in a text such as "P1,P3", in the order of the suite."""
    names = [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"{name!r} is no target of the suite. There are {', '.join(TARGETS)}.")
    return tuple(name for name in TARGETS if name in names)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    options = Options(
        only=arguments.only,
        target=arguments.target,
        head=arguments.draft,
        device=arguments.device,
        tiny=arguments.tiny,
        rounds=arguments.rounds,
        traces=arguments.profile,
    )
    console, entries = Console(), []
    if options.tiny:
        console.print("A TRIAL on tiny models: the figures say nothing about speed.", style="bold")
    with Console(stderr=True).status("", refresh_per_second=1) as status:
        for entry in suite.run(options, lambda name: status.update(f"{name}: {TARGETS[name]}")):
            entries.append(entry)
            console.print(line_of(entry), markup=False, highlight=False, soft_wrap=True)
    setting = environment(options.device)
    console.print()
    console.print(table_of(entries))
    names = ("device", "torch", "transformers", "hf_specdec")
    console.print(", ".join(f"{name} {setting[name]}" for name in names), markup=False, highlight=False)
    found = {entry.name: entry.to_dict() for entry in entries}
    print(json.dumps({"benchmark": "speed targets", "trial": options.tiny, **setting, "targets": found}))
    return 1 if any(entry.status == "failed" for entry in entries) else 0


def line_of(entry: Entry) -> str:
    """A result in one line."""
    mark = {None: "", True: ", reached", False: ", not reached"}[entry.is_met]
    notes = "; ".join(filter(None, (entry.note, entry.caveat)))
    goals = GOALS[entry.name]
    values = ", ".join(f"{key} {goals[key].show(value)}" for key, value in entry.values.items())
    return f"{entry.name} {entry.status}{mark} in {entry.seconds:.0f} s. {values} {notes}".rstrip()


def table_of(entries: list[Entry]) -> Table:
    table = Table(
        Column("", no_wrap=True),
        Column("what"),
        Column("figure", no_wrap=True),
        Column("measured", justify="right", no_wrap=True),
        Column("to reach", justify="right", no_wrap=True),
        Column("reached", no_wrap=True),
        box=None,
        pad_edge=False,
    )
    for entry in entries:
        what, reached = TARGETS[entry.name], {None: "", True: "yes", False: "no"}[entry.is_met]
        if not entry.values:
            table.add_row(entry.name, what, "", entry.status, "", reached)
        for index, (key, value) in enumerate(entry.values.items()):
            first = (entry.name, what) if index == 0 else ("", "")
            goal = GOALS[entry.name][key]
            table.add_row(*first, key, goal.show(value), str(goal), "" if index else reached)
        for name, times in details_of(entry).items():
            table.add_row("", "", name, times, "", "")
    return table


def details_of(entry: Entry) -> dict[str, str]:
    """Timings of a target by name: median, 20th and 80th percentile as text."""
    found = {}
    for name, times in entry.figures.get("ms", {}).items():
        found[f"{name}, ms"] = spread_of(times) if isinstance(times, dict) else f"{times:.2f}"
    for call in entry.figures.get("calls", []):
        if call["task"] == entry.figures["calls"][-1]["task"]:
            found[f"{call['contender']}, tok/s"] = spread_of(call)
    return found


def spread_of(times: dict[str, float]) -> str:
    return f"{times['p50']:.2f} ({times['p20']:.2f} – {times['p80']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
