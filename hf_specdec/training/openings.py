"""Given beginnings ("openings") of questions that the target writes itself."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

from .options import TrainOptions
from .scripts import ScriptPart, Template


_ANY = "subject"
_PLACE = re.compile(r"\{([a-z]+)\}")
_HEADING = re.compile(r"\[([a-z]+)\]")


class Openings:
    """
    Openings from a file, which a share of the conversations take in turn.

    A model that chooses its own questions hardly ever asks for code; an opening such as "Write a Python function that"
    makes it ask.

    A `{subject}` in a line is filled from a second file, in which a line `[food]` is the heading of the subjects for
    `{food}`; `{subject}` takes the subjects of all headings. A line uses every subject once before it repeats one. The
    opening of a conversation depends on the conversation's number alone, so that runs continue and processes share the
    work.

    Args:
        options (`TrainOptions`): `openings`, `subjects`, `openings_share`, `turns` and `seed`.

    Raises:
        ValueError: for a missing or empty file, and for a `{…}` that no subject fills.
    """

    def __init__(self, options: TrainOptions):
        self.turns, self.share = options.turns, options.openings_share
        self.lines: list[str] = []
        self.subjects: dict[str, list[str]] = {}
        if options.openings is not None:
            self.lines = [line.replace("\\n", "\n") for line in _read("openings", options.openings)]
        if options.subjects is not None:
            self.subjects = _by_heading(_read("subjects", options.subjects))
            for names in self.subjects.values():
                random.Random(options.seed).shuffle(names)
        for line in self.lines:
            for name in _PLACE.findall(line):
                if name not in self.subjects:
                    heading = "" if name == _ANY else f" with the heading [{name}]"
                    raise ValueError(
                        f"`openings`={options.openings!r}: nothing fills {{{name}}} in the line {line!r}. Give "
                        f"`subjects`, a file of what may stand there{heading}."
                    )

    def of(self, job: int) -> str:
        """The opening of conversation `job`; empty if the target chooses the question itself."""
        number = math.floor(job * self.share)
        if not self.lines or math.floor((job + 1) * self.share) == number:
            return ""
        turn, index = divmod(number, len(self.lines))
        places = itertools.count(turn + index)

        def subject(place: re.Match[str]) -> str:
            names = self.subjects[place[1]]
            return names[next(places) % len(names)]

        return _PLACE.sub(subject, self.lines[index])

    def jobs(self, template: Template) -> Callable[[int], list[ScriptPart]]:
        """The function from a conversation's number to its parts."""
        return lambda job: template.both_sides(1 + job // 2 % self.turns, self.of(job))


def _read(option: str, name: str) -> list[str]:
    """The lines of the file that `option` names, without empty lines and comments."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"`{option}`={name!r}: there is no such file. Give one with a line each.")
    lines = path.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise ValueError(f"`{option}`={name!r} has no lines.")
    return lines


def _by_heading(lines: list[str]) -> dict[str, list[str]]:
    """The subjects by heading, with all subjects under `subject`."""
    found: dict[str, list[str]] = {_ANY: []}
    heading = _ANY
    for line in lines:
        if match := _HEADING.fullmatch(line.strip()):
            heading = match[1]
            continue
        for name in {_ANY, heading}:
            found.setdefault(name, []).append(line.strip())
    return found
