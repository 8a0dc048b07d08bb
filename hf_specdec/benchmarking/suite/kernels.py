"""P6 and P7: the kernels' own benchmarks, each a script whose last line is JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).parents[3] / "kernels" / "hf-specdec-kernels" / "benchmarks"
SECONDS = 120
"""That a script may take."""


def find_script(kernel: str, folder: Path = FOLDER) -> Path | None:
    """The benchmark of a kernel; None if this installation has none."""
    return next(iter(sorted(folder.glob(f"*{kernel}*.py"))), None)


def run_script(script: Path) -> dict[str, Any]:
    """
    Runs a benchmark in a process of its own.

    Returns:
        `dict`: the JSON of its last line.

    Raises:
        RuntimeError: if it fails, takes too long, or its last line is no JSON object.
    """
    try:
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script.name} took more than {SECONDS} seconds.") from error
    lines = (done.stdout.strip() or "nothing").splitlines()
    if done.returncode != 0:
        last = (done.stderr.strip() or lines[-1]).splitlines()[-1]
        raise RuntimeError(f"{script.name} ended with status {done.returncode}: {last}")
    try:
        found = json.loads(lines[-1])
    except ValueError as error:
        raise RuntimeError(f"{script.name}: its last line is no JSON: {lines[-1][:80]}") from error
    if not isinstance(found, dict):
        raise RuntimeError(f"{script.name}: its last line is no JSON object: {lines[-1][:80]}")
    return found
