"""
Measures one contender in a process of its own: `python -m peers.worker CONTENDER JOB OUTPUT`.

Adds JSON lines to OUTPUT, each as soon as it is known (see results.py): what the contender ran with, then one line for
every temperature and number of open requests that OUTPUT lacks, or that has failed. Standard library only, as job.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contenders import CONTENDERS, ONE_AT_A_TIME
from .job import Engine, Job
from .results import append, done_of, read


MOST_TEXTS = 8
"""Greedy texts that are kept, to be compared."""


def cells(
    engine: Engine, job: Job, done: Container[tuple[float, int]] = (), serves: Callable[[int], bool] = bool
) -> Iterator[dict[str, Any]]:
    """
    The figures of every cell that is not done; a cell that fails does not end the others. With more open requests than
    the engine `serves` it is not tried.
    """
    for temperature, number in job.cells:
        if (temperature, number) in done:
            continue
        cell = {"temperature": temperature, "open": number}
        if not serves(number):
            yield cell | {"error": ONE_AT_A_TIME}
            continue
        try:
            yield cell | measure(engine, job, temperature, number)
        except Exception as error:  # the other cells are still measured
            yield cell | {"error": f"{type(error).__name__}: {error}"[:500]}


@dataclass(frozen=True)
class Turn:
    """One turn over the prompts: its texts, its seconds, and what was drafted and accepted."""

    texts: list[list[int]]
    seconds: float
    drafts: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.texts)) / self.seconds


def turns(engine: Engine, job: Job, temperature: float, number: int, most: int) -> list[Turn]:
    """Up to `most` turns, of which none but the first begins after the job's seconds."""
    begin, found = time.perf_counter(), []
    while len(found) < most and (not found or time.perf_counter() - begin < job.seconds):
        start = time.perf_counter()
        answers = [engine.generate(batch, temperature) for batch in job.batches(number)]
        seconds = time.perf_counter() - start
        drafts, accepted = (sum(getattr(one, name) or 0 for one in answers) for name in ("drafts", "accepted"))
        found.append(Turn([text for one in answers for text in one.tokens], seconds, drafts, accepted))
    return found


def measure(engine: Engine, job: Job, temperature: float, number: int) -> dict[str, Any]:
    """The figures of one cell; the throughput is the median of its turns, the lower one of two in the middle."""
    turns(engine, job, temperature, number, job.warm_up)
    timed = turns(engine, job, temperature, number, job.turns)
    rates = sorted(turn.rate for turn in timed)
    drafts, accepted = sum(turn.drafts for turn in timed), sum(turn.accepted for turn in timed)
    return {
        "tokens_per_second": rates[(len(rates) - 1) // 2],
        "of_turns": rates,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "texts": timed[0].texts[:MOST_TEXTS] if temperature == 0 else [],
    }


def main(name: str, job_file: str, output: str) -> None:
    job, path = Job.read(Path(job_file)), Path(output)
    contender, done = CONTENDERS[name], done_of(read(path), name)
    begin = time.perf_counter()
    engine = contender.start(name, job)
    seconds = time.perf_counter() - begin
    append(path, {"contender": name, "ran_with": engine.ran_with, "seconds_to_start": seconds})
    try:
        for cell in cells(engine, job, done, contender.serves):
            append(path, {"contender": name, **cell})
    finally:
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
