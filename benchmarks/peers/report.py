"""The table and the picture of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from .contenders import CONTENDERS


COLOURS = {
    "hf": "#999999",
    "vllm_engine": "#E69F00",
    "sglang_engine": "#56B4E9",
    "eagle": "#CC79A7",
    "ours": "#0072B2",
}


def steps_per_second(cell: dict[str, Any]) -> float:
    """Steps of each row in a second: with a set acceptance it says what texts cannot."""
    return cell["tokens_per_second"] / cell["open"] / (cell["acceptance_length"] or 1.0)


def share_of_same(texts: list[list[int]], others: list[list[int]]) -> float | None:
    """The share of equal texts, each as long as the shorter one; None if there are none."""
    pairs = list(zip(texts, others, strict=False))
    return sum(all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs) / len(pairs) if pairs else None


def with_shares(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    The cells with what compares them: `steps_per_second` of each row, `over_first`, the throughput over that of the
    first contender that has the cell, and `same_texts`, the share of greedy texts that are equal to its.
    """
    first: dict[tuple[float, int], dict[str, Any]] = {}
    found = []
    for cell in cells:
        if "error" not in cell:
            other = first.setdefault((cell["temperature"], cell["open"]), cell)
            cell = cell | {
                "steps_per_second": steps_per_second(cell),
                "over_first": cell["tokens_per_second"] / other["tokens_per_second"],
                "same_texts": share_of_same(cell["texts"], other["texts"]),
            }
        found.append(cell)
    return found


def table_of(cells: list[dict[str, Any]]) -> Table:
    """The table, a row for each cell that was measured."""
    table = Table("contender", "T", "open", "tok/s", "range", "over first", "tok/step", "steps/s", "same texts")
    done = [cell for cell in cells if "error" not in cell]
    for cell in sorted(done, key=lambda cell: (cell["temperature"], cell["open"])):
        length, same = cell["acceptance_length"], cell["same_texts"]
        table.add_row(
            CONTENDERS[cell["contender"]].label,
            f"{cell['temperature']:g}",
            str(cell["open"]),
            f"{cell['tokens_per_second']:,.1f}",
            f"{min(cell['of_turns']):,.1f} – {max(cell['of_turns']):,.1f}",
            f"{cell['over_first']:.2f}",
            "" if length is None else f"{length:.2f}",
            f"{cell['steps_per_second']:.1f}",
            "" if same is None else f"{same:.0%}",
        )
    return table


def failures_of(cells: list[dict[str, Any]]) -> list[str]:
    """A line for each error of a contender, with the cells that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if "error" in cell:
            key = cell["contender"], cell["error"].splitlines()[0]
            found.setdefault(key, []).append(f"{_way(cell['temperature'])}, {cell['open']} open")
    return [f"{CONTENDERS[name].label} ({'; '.join(ways)}): {error}" for (name, error), ways in found.items()]


def markdown_of(cells: list[dict[str, Any]]) -> str:
    """Tokens per second as a table of Markdown: a row for each contender, a column for each cell."""
    done = {(cell["contender"], cell["temperature"], cell["open"]): cell for cell in cells if "error" not in cell}
    columns = sorted({key[1:] for key in done})
    lines = [["tokens/s", *(f"{_way(temperature)}, {number} open" for temperature, number in columns)]]
    for name in CONTENDERS:
        if any(key[0] == name for key in done):
            lines.append([CONTENDERS[name].label, *(_rate(done.get((name, *column))) for column in columns)])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rate(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    rate = cell["tokens_per_second"]
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _way(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def save_picture(cells: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws tokens per second into a file: a panel for each temperature and number of open requests."""
    done = [cell for cell in cells if "error" not in cell]
    temperatures = sorted({cell["temperature"] for cell in done})
    numbers = sorted({cell["open"] for cell in done})
    names = [name for name in CONTENDERS if any(cell["contender"] == name for cell in done)]
    figure = Figure(
        figsize=(3.4 + 3.6 * len(numbers), 1 + (0.6 + 0.26 * len(names)) * len(temperatures)), layout="constrained"
    )
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(temperatures), len(numbers), squeeze=False, sharey=True)
    for row, temperature in zip(panels, temperatures, strict=True):
        for axes, number in zip(row, numbers, strict=True):
            of = {c["contender"]: c for c in done if (c["temperature"], c["open"]) == (temperature, number)}
            values = [of[name]["tokens_per_second"] if name in of else 0.0 for name in names]
            bars = axes.barh(
                [CONTENDERS[name].label for name in names],
                values,
                color=[COLOURS[CONTENDERS[name].family] for name in names],
            )
            axes.bar_label(bars, [f"{value:,.4g}" if value else "" for value in values], padding=2, fontsize=7)
            axes.margins(x=0.2)
            axes.set_title(f"{_way(temperature)}, {number} open", fontsize=9)
            axes.set_xlabel("tokens per second", fontsize=8)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].invert_yaxis()  # of all panels, which share it
    figure.savefig(path, dpi=150)
