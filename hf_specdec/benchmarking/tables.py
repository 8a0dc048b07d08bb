"""Benchmark reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

from .bench import REFERENCE, Report
from .equality import Difference
from .figures import ALL_TASKS, Figures


def show(console: Console, *tables: Table) -> None:
    """
    Prints the first of some tables that fits into a terminal, or the first where there is none. Nothing is cut off: a
    table that does not fit is wider.
    """
    options = console.options.update(width=1000, max_width=1000)
    widths = [Measurement.get(console, options, table).maximum for table in tables]
    fitting = [place for place, width in enumerate(widths) if width <= console.width]
    chosen = (fitting or [len(tables) - 1])[0] if console.is_terminal else 0
    width = console.width
    console.width = max(width, widths[chosen])
    try:
        console.print(tables[chosen])
    finally:
        console.width = width


def table(report: Report, is_brief: bool = False) -> Table:
    """The table of speed, speed-up and acceptance by task and contender; a brief one has no percentiles and depths."""
    temperatures = {found.temperature for found in report.figures}
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    found = Table(
        Column("task", no_wrap=True),
        *([Column("T", **right)] if len(temperatures) > 1 else []),
        Column("call", no_wrap=True),
        Column("tok/s", **right),
        *([] if is_brief else [Column("p20 – p80", **right)]),
        Column("speed-up", **right),
        Column("tokens/step", **right),
        *([] if is_brief else [Column("accepted to depth 1, 2, …", no_wrap=True)]),
        Column("identical", no_wrap=True),
        box=None,
        pad_edge=False,
    )
    last = None
    for row in report.figures:
        group = (row.task, row.temperature)
        if last is not None and group != last:
            found.add_section()
            found.add_row()
        cells = _cells(row, report.differences, is_brief)
        temperature = [f"{row.temperature:g}"] if len(temperatures) > 1 else []
        task = row.task if row.task != ALL_TASKS else "all tasks"
        found.add_row(task if group != last else "", *temperature, *cells)
        last = group
    return found


def suite_table(report: Report) -> Table:
    """The table of what Spec-Bench prints for every task, as it defines it, beside our tokens of a step."""
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    names = ("mean accepted tokens", "tokens/step", "tok/s", "tok/s, plain", "speed-up")
    found = Table("task", "T", "call", *(Column(name, **right) for name in names), box=None, pad_edge=False)
    plain = {(row.task, row.temperature): row.mean_speed for row in report.figures if row.contender == REFERENCE}
    for row in report.figures:
        if row.contender == REFERENCE:
            continue
        lengths = (row.mean_accepted_tokens, row.mean_acceptance_length)
        speeds = (row.mean_speed, plain[row.task, row.temperature])
        found.add_row(
            row.task if row.task != ALL_TASKS else "overall",
            f"{row.temperature:g}",
            row.contender,
            *("" if length is None else f"{length:.2f}" for length in lengths),
            *(f"{speed:.1f}" for speed in speeds),
            f"{row.mean_speed_up:.2f}×",
        )
    return found


def _cells(row: Figures, differences: Sequence[Difference], is_brief: bool) -> list[str]:
    length = row.mean_acceptance_length
    return [
        row.contender,
        f"{row.tokens_per_second:.1f}",
        *([] if is_brief else [f"{row.p20:.1f} – {row.p80:.1f}"]),
        f"{row.speed_up:.2f}×",
        "" if length is None else f"{length:.2f}",
        *([] if is_brief else [per_depth(row.acceptance_per_position or [])]),
        _identical(row, differences),
    ]


def per_depth(shares: Sequence[float], most: int = 6) -> str:
    """Shares by depth in few characters, such as ".75 .50 …"; at most `most` of them."""
    text = " ".join(f"{share:.2f}".removeprefix("0") for share in shares[:most])
    return text + (" …" if len(shares) > most else "")


def _identical(row: Figures, differences: Sequence[Difference]) -> str:
    if row.identical is None:
        return "sampled"
    if row.identical == row.texts:
        return "yes"
    own = [d for d in differences if d.contender == row.contender and row.task in (d.task, ALL_TASKS)]
    text = f"{row.identical} of {row.texts}"
    if not own:
        return text
    first = min(own, key=lambda difference: difference.position)
    return f"{text}; token {first.position}, gap {first.gap:.2g}"


def differences_table(differences: Sequence[Difference]) -> Table:
    """The table of the first difference of each text, with the gap of the two best logits there."""
    found = Table("call", "task", "prompt", "first differing token", "best logit − second", box=None, pad_edge=False)
    for difference in differences:
        cells = (difference.prompt, difference.position, f"{difference.gap:.3g}")
        found.add_row(difference.contender, difference.task, *map(str, cells))
    return found
