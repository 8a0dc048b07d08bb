"""Results of a sweep as a JSON file, so that parts of it can run one after the other."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from .modes import Outcome
from .registry import Pair
from .running import Result


def read_results(path: Path) -> dict[Pair, Result]:
    """The results of a file, by pair; empty if there is none yet."""
    if not path.exists():
        return {}
    results = {}
    for entry in json.loads(path.read_text()):
        pair = Pair(**entry["pair"])
        outcomes = {mode: Outcome(**outcome) for mode, outcome in entry["outcomes"].items()}
        results[pair] = Result(pair, outcomes, entry["problem"])
    return results


def write_results(path: Path, results: dict[Pair, Result]) -> None:
    """Writes results to a file, sorted by pair."""
    path.write_text(json.dumps([asdict(results[pair]) for pair in sorted(results)], indent=1))
