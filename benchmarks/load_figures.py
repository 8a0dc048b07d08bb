"""Figures of a load on a server or a manager: throughput, latencies and acceptance."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Timing:
    """
    One request: number of generated tokens, the times of its pieces of text in seconds from the start, and whether it
    was cut off.
    """

    tokens: int
    pieces: list[float]
    is_cut: bool = False

    @property
    def ttft(self) -> float:
        """Time to the first token, in seconds."""
        return self.pieces[0]

    @property
    def tpot(self) -> float:
        """Time per token after the first, in seconds."""
        return (self.pieces[-1] - self.pieces[0]) / max(self.tokens - 1, 1)

    @property
    def itl(self) -> list[float]:
        """Times between successive pieces of text, in seconds."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]


def summary(
    seconds: float, timings: list[Timing], before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    """
    The figures of one load. Requests that were cut off count in all but the number of requests.

    Args:
        seconds (`float`): duration of the load.
        timings (`list[Timing]`): timings of its requests.
        before, after (`dict`): counters of speculation before and after the load, under vLLM's names; empty if there
            are none.
    """
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts, drafted = change.get("num_drafts", 0.0), change.get("num_draft_tokens", 0.0)
    prefix = "num_accepted_tokens_per_pos_"
    by_position = {int(name.removeprefix(prefix)): n for name, n in change.items() if name.startswith(prefix)}
    served = sum(not timing.is_cut for timing in timings)
    result: dict[str, Any] = {
        "requests": served,
        "requests_per_second": served / seconds,
        "tokens_per_second": sum(timing.tokens for timing in timings) / seconds,
        "mean_acceptance_length": 1 + (change["num_accepted_tokens"] / drafts if drafts else 0.0) if change else None,
        "draft_acceptance_rate": change["num_accepted_tokens"] / drafted if drafted else None,
        "acceptance_per_position": [by_position[place] / drafts for place in sorted(by_position)] if drafts else None,
    }
    spans = {
        "ttft": [timing.ttft for timing in timings],
        "tpot": [timing.tpot for timing in timings],
        "itl": [gap for timing in timings for gap in timing.itl],
    }
    for name, values in spans.items():
        values = sorted(values) or [0.0]
        p99 = values[math.ceil(0.99 * len(values)) - 1]
        shares = {"mean": statistics.mean(values), "median": statistics.median(values), "p99": p99}
        result[f"{name}_ms"] = {share: 1e3 * value for share, value in shares.items()}
    return result


def new_table() -> Table:
    """An empty table for the rows of `add_row`."""
    spans = "TTFT p50/p99", "TPOT p50/p99", "ITL p50/p99"
    return Table("contender", "T", "open", "tok/s", "over first", "req/s", *spans, "length")


def add_row(table: Table, figures: dict[str, Any]) -> None:
    """
    Adds a row for a `summary`, with times in milliseconds.

    Args:
        table (`Table`): a table of `new_table`.
        figures (`dict`): a `summary` with `contender`, `temperature`, `concurrency`, and optionally `over_first`, the
            throughput over the first contender's.
    """
    spans = (figures[f"{name}_ms"] for name in ("ttft", "tpot", "itl"))
    length = figures["mean_acceptance_length"]
    table.add_row(
        figures["contender"],
        f"{figures['temperature']:g}",
        str(figures["concurrency"]),
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['over_first']:.2f}" if "over_first" in figures else "",
        f"{figures['requests_per_second']:.2f}",
        *(f"{span['median']:.0f} / {span['p99']:.0f}" for span in spans),
        "" if length is None else f"{length:.2f}",
    )
