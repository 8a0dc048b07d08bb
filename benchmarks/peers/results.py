"""
Results as JSON lines, each written as soon as it is known: what a run that is cut has measured stays, and the next one
goes on. Standard library only, as job.py.

The first line is `{"job": …}`; every other one has the `contender` and is what it ran with (`ran_with`), the figures
of a cell (`temperature` and `open`), or how it failed (`failure`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .contenders import CONTENDERS


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without a last one that was cut; none if there is no file."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds a line, which is on the disk's way before this returns."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def begin(path: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """
    Begins a file, or goes on with one of the same job; returns its lines so far.

    Raises:
        ValueError: for a file of another job, naming what differs.
    """
    lines = read(path)
    if not lines:
        path.unlink(missing_ok=True)
        append(path, {"job": job})
        return []
    before = lines[0].get("job", {})
    other = [name for name in job if before.get(name) != job[name]]
    if other:
        name = other[0]
        raise ValueError(
            f"--results {path} is of another job: `{name}` was {before.get(name)!r} and is {job[name]!r}. Name "
            "another file."
        )
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    if path.read_text() != whole:  # the last line was cut
        beside = path.with_name(path.name + ".new")
        beside.write_text(whole)
        os.replace(beside, path)
    return lines[1:]


def cells_of(lines: Iterable[dict[str, Any]], name: str | None = None) -> list[dict[str, Any]]:
    """The figures of cells, of one contender if it is named; of a cell that was measured twice the last ones."""
    found = {}
    for line in lines:
        if "open" in line and name in (None, line["contender"]):
            found[line["contender"], line["temperature"], line["open"]] = line
    return list(found.values())


def done_of(lines: Iterable[dict[str, Any]], name: str) -> set[tuple[float, int]]:
    """Temperature and open requests of a contender's cells that need not be measured: those that failed are again."""
    cells, serves = cells_of(lines, name), CONTENDERS[name].serves
    return {(cell["temperature"], cell["open"]) for cell in cells if "error" not in cell or not serves(cell["open"])}
