"""Small training runs of the tiny target, and what they log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .goldens import TINY_TARGET


SMALL: dict[str, Any] = {
    "target": str(TINY_TARGET),
    "max_length": 64,
    "batch_tokens": 512,
    "rows_at_once": 8,
    "eval_texts": 8,
    "logging_steps": 1,
    "progress": False,
    "cpu": True,
}
"""Options of every small run."""
RUN = SMALL | {"unroll_steps": 3}
"""Options of a small run that unrolls the head three times."""


def log_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def losses_of(output: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in log_of(output) if "loss" in record}
