"""`hf-specdec bench --suite gpu`: the table of the project's speed targets."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Column, Table

from ..benchmarking import suite as targets
from ..benchmarking.environment import environment


def run_suite(
    name: str,
    only: str | None,
    target: str | None,
    head: str | None,
    *,
    device: str,
    tiny: bool,
    rounds: int,
    profile: Path | None,
) -> None:
    """Measures the suite, prints a table and one line of JSON. Exits with 1 if a target failed."""
    if name != "gpu":
        raise typer.BadParameter(f"{name!r} is no suite. There is: gpu.", param_hint="--suite")
    if not device.startswith("cuda") and not tiny:
        raise typer.BadParameter(
            f"gpu needs a CUDA device, and this would run on {device!r}. Run it on a machine with a GPU, or try the "
            "code out with --tiny.",
            param_hint="--suite",
        )
    options = targets.Options(
        only=_names(only),
        target=target,
        head=head,
        device=device,
        tiny=tiny,
        rounds=rounds,
        traces=profile,
    )
    console = Console()
    if tiny:
        console.print("A TRIAL on tiny models: the figures say nothing about speed.", style="bold")
    entries = []
    with Console(stderr=True).status("", refresh_per_second=1) as status:
        for entry in targets.run(options, lambda name: status.update(f"{name}: {targets.TARGETS[name]}")):
            entries.append(entry)
            mark = {None: "", True: ", reached", False: ", not reached"}[entry.is_met]
            notes = "; ".join(filter(None, (entry.note, entry.caveat)))
            goals = targets.GOALS[entry.name]
            values = ", ".join(f"{key} {goals[key].show(value)}" for key, value in entry.values.items())
            line = f"{entry.name} {entry.status}{mark} in {entry.seconds:.0f} s. {values} {notes}".rstrip()
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    setting = environment(device)
    console.print()
    console.print(_table(entries))
    names = ("device", "torch", "transformers", "hf_specdec")
    console.print(", ".join(f"{name} {setting[name]}" for name in names), markup=False, highlight=False)
    found = {entry.name: entry.to_dict() for entry in entries}
    typer.echo(json.dumps({"benchmark": "hf-specdec bench --suite gpu", "trial": tiny, **setting, "targets": found}))
    if any(entry.status == "failed" for entry in entries):
        raise typer.Exit(1)


def _names(only: str | None) -> tuple[str, ...]:
    if only is None:
        return tuple(targets.TARGETS)
    names = [name.strip().upper() for name in only.split(",")]
    for name in names:
        if name not in targets.TARGETS:
            message = f"{name!r} is no target of the suite. There are {', '.join(targets.TARGETS)}."
            raise typer.BadParameter(message, param_hint="--only")
    return tuple(name for name in targets.TARGETS if name in names)


def _table(entries: list[targets.Entry]) -> Table:
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
        what, reached = targets.TARGETS[entry.name], {None: "", True: "yes", False: "no"}[entry.is_met]
        if not entry.values:
            table.add_row(entry.name, what, "", entry.status, "", reached)
        for index, (key, value) in enumerate(entry.values.items()):
            first = (entry.name, what) if index == 0 else ("", "")
            goal = targets.GOALS[entry.name][key]
            table.add_row(*first, key, goal.show(value), str(goal), "" if index else reached)
        for name, times in _details(entry).items():
            table.add_row("", "", name, times, "", "")
    return table


def _details(entry: targets.Entry) -> dict[str, str]:
    """Timings of a target by name: median, 20th and 80th percentile as text."""
    found = {}
    for name, times in entry.figures.get("ms", {}).items():
        found[f"{name}, ms"] = _spread(times) if isinstance(times, dict) else f"{times:.2f}"
    for call in entry.figures.get("calls", []):
        if call["task"] == entry.figures["calls"][-1]["task"]:
            found[f"{call['contender']}, tok/s"] = _spread(call)
    return found


def _spread(times: dict[str, float]) -> str:
    return f"{times['p50']:.2f} ({times['p20']:.2f} – {times['p80']:.2f})"
