"""P6 and P7: the kernels' own benchmarks, each a script that prints JSON as its last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).parents[2] / "kernels" / "hf-specdec-kernels" / "benchmarks"
SECONDS = 180
"""Time limit of a script, in seconds."""


def find_script(kernel: str, folder: Path = FOLDER) -> Path | None:
    """The path of a kernel's benchmark script; None if there is none."""
    return next(iter(sorted(folder.glob(f"*{kernel}*.py"))), None)


def run_script(script: Path) -> dict[str, Any]:
    """
    Runs a benchmark script in a separate process.

    Returns:
        `dict`: the JSON object of the last line of its output.

    Raises:
        RuntimeError: if the script fails, takes more than `SECONDS`, or its last line is no JSON object.
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


def values_of_tree_attention(found: dict[str, Any]) -> dict[str, float]:
    """
    The values of P6, each the worst over the batch sizes: share of the copy bandwidth, time over the floor, and
    speed-ups over the peers that ran.
    """
    rows = found["rows"]
    peers = {"over sdpa": "sdpa, K/V repeated", "over flex": "flex_attention"}
    faster = {
        name: min((row["peers"][peer]["over_ours"] for row in rows if peer in row["peers"]), default=0.0)
        for name, peer in peers.items()
    }
    return {
        "bandwidth, 16 nodes": min(row["share_of_copy_bandwidth"] for row in rows if row["nodes"] == 16),
        "over floor, 64 nodes": max(row["over_floor"] for row in rows if row["nodes"] == 64),
        **faster,
    }


def values_of_rejection_sampling(found: dict[str, Any]) -> dict[str, float]:
    """The value of P7: time at batch 64, with a sampled tree and a temperature, over one read of the target logits."""
    rows = [row for row in found["rows"] if row["batch"] == 64 and row.get("walk") == "rejection, temperature"]
    return {"over floor": max(row["over_floor"] for row in rows)}
