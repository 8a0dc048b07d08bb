"""How questions begin that the target writes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .options import TrainOptions
from .scripts import Part, Template


class Openings:
    """
    The beginnings in a file, taken in turn by every second conversation. A model that asks what it likes hardly ever
    asks for code; an opening such as "Write a Python function that" makes it.

    Args:
        options (`TrainOptions`): `openings` and `turns`.

    Raises:
        ValueError: for a file that is not there, or empty.
    """

    def __init__(self, options: TrainOptions):
        self.turns, self.lines = options.turns, []
        if options.openings is None:
            return
        path = Path(options.openings)
        if not path.is_file():
            raise ValueError(f"`openings`={options.openings!r}: there is no such file. Give one with a line each.")
        lines = path.read_text(encoding="utf-8").splitlines()
        self.lines = [line.replace("\\n", "\n") for line in lines if line.strip()]
        if not self.lines:
            raise ValueError(f"`openings`={options.openings!r} has no lines.")

    def of(self, job: int) -> str:
        """How the first question of conversation `job` begins; empty: as the target likes."""
        return self.lines[job // 2 % len(self.lines)] if self.lines and job % 2 else ""

    def jobs(self, template: Template) -> Callable[[int], list[Part]]:
        """How conversation i goes."""
        return lambda job: template.both_sides(1 + job // 2 % self.turns, self.of(job))
