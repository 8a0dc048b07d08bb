"""Counts of what speculation did in a `generate` call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class SpeculationMetrics:
    """
    Counts and times of speculation in one `generate` call. A draft is one unfinished row in one step for which the
    drafter was asked; accepted tokens are counted after truncation by the stopping criteria. The first token comes
    from the prefill and belongs to no step.

    Args:
        num_drafts (`int`): drafts made.
        num_draft_tokens (`int`): draft tokens verified.
        num_accepted_tokens (`int`): draft tokens kept.
        accepted_per_step (`list[list[int]]`): for each row, the draft tokens kept in each of its steps.
        num_accepted_per_position (`list[int]`): how many drafts kept a path that reaches depth i + 1.
        seconds (`dict[str, float]`): seconds spent by phase: prefill, propose, score, accept, commit; or prefill and
            steps, where whole steps ran on the device. On an accelerator these are host times: work still queued on
            the device counts where the host next waits for it.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_step: list[list[int]] = field(default_factory=list)
    num_accepted_per_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, so that the bonus or recovered token counts; 1.0 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0.0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts whose accepted path reaches depth 1, 2, …"""
        return [count / self.num_drafts for count in self.num_accepted_per_position]

    def add_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one draft of one row."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        missing = num_accepted_tokens - len(self.num_accepted_per_position)
        self.num_accepted_per_position += [0] * missing
        for position in range(num_accepted_tokens):
            self.num_accepted_per_position[position] += 1

    @classmethod
    def sum_of(cls, all_metrics: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
        """The counts of several calls or requests, added up, and their rows one after the other."""
        total = cls()
        for metrics in all_metrics:
            total.num_drafts += metrics.num_drafts
            total.num_draft_tokens += metrics.num_draft_tokens
            total.num_accepted_tokens += metrics.num_accepted_tokens
            total.accepted_per_step += metrics.accepted_per_step
            counts, more = total.num_accepted_per_position, metrics.num_accepted_per_position
            counts += [0] * (len(more) - len(counts))
            for position, count in enumerate(more):
                counts[position] += count
            for name, seconds in metrics.seconds.items():
                total.seconds[name] = total.seconds.get(name, 0.0) + seconds
        return total

    def copy(self) -> SpeculationMetrics:
        """The counts as they are now: those of the copy do not grow with what comes."""
        return SpeculationMetrics(
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            [list(of_row) for of_row in self.accepted_per_step],
            list(self.num_accepted_per_position),
            dict(self.seconds),
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class StepLog:
    """Log of a call's steps, kept until it is known which of their tokens are part of the output."""

    def __init__(self, batch_size: int):
        self._steps: list[list[tuple[int, int, int | None]]] = [[] for _ in range(batch_size)]

    def add(self, row: int, start: int, accepted: int, drafted: int | None) -> None:
        """Logs a step of a row that was `start` tokens long; `drafted` is None if the drafter was not asked."""
        self._steps[row].append((start, accepted, drafted))

    def count(self, metrics: SpeculationMetrics, lengths: list[int]) -> None:
        """Adds the steps of rows that ended up `lengths` long to `metrics`; tokens past a row's end do not count."""
        for steps, length in zip(self._steps, lengths, strict=True):
            kept = [(min(accepted, length - start), drafted) for start, accepted, drafted in steps if start < length]
            metrics.accepted_per_step.append([accepted for accepted, _ in kept])
            for accepted, drafted in kept:
                if drafted is not None:
                    metrics.add_draft(drafted, accepted)


_last = threading.local()


def last_metrics() -> SpeculationMetrics | None:
    """The `SpeculationMetrics` of the last speculative `generate` call in this thread; None before any."""
    return getattr(_last, "metrics", None)


def metrics_of_last_call() -> SpeculationMetrics:
    """`last_metrics` after a speculative call in this thread, hence never None."""
    return _last.metrics


def set_last_metrics(metrics: SpeculationMetrics) -> None:
    """Keeps the metrics of a finished call for `last_metrics` in this thread."""
    _last.metrics = metrics
