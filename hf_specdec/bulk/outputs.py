"""The output of a bulk job: which run it is of, what is done, and the answers in the order of the input."""

from __future__ import annotations

import glob
import json
import os
import time
from array import array
from pathlib import Path
from typing import Any

from .journals import Journal, entries
from .records import Records


SECONDS_FOR_RANK_0 = 600.0
"""Seconds in which rank 0 must have said which run it is."""


class Output:
    """
    The output file of a run, and beside it `….run.json`, which says what run it is, and while it runs a journal for
    each process, `….part0` and so on. The output file is made at the end; until then, the same run goes on where it
    was.

    Args:
        path (`Path`): the output file.
        records (`Records`): the input.
        options (`dict[str, Any]`): those that change the answers.
        rank (`int`), world_size (`int`): of the processes that share the run, and of which each has its `share`.

    Raises:
        OSError, ValueError: if there is no such folder, or the files are of another run, or of one that runs.
    """

    def __init__(self, path: Path, records: Records, options: dict[str, Any], rank: int = 0, world_size: int = 1):
        self.path, self.records, self.rank, self.world_size = path, records, rank, world_size
        self._about = path.with_name(f"{path.name}.run.json")
        self._run = {"input": {"sha256": records.digest, "records": len(records)}, "options": options}
        self.num_answered = self.num_tokens = 0
        """Records with an answer, and the tokens of these."""
        self.skipped: dict[int, str] = {}
        """What is wrong with each bad record, by its line."""
        self.journal: Journal | None = None
        self._read_to: dict[Path, int] = {}
        self._journals: list[Path] = []
        self._of = array("H", [0]) * len(records)
        self._begins = array("q", [-1]) * len(records)
        self._check()
        if self.is_complete:
            self._take_result()
            self._remove_journals()  # left by a process that was killed as it removed them
            return
        self.journal = Journal(path.with_name(f"{path.name}.part{rank}"))
        self.update()
        if self.is_complete:  # by rank 0, just now, which then removes journals
            self.journal.close()
            self.journal.path.unlink(missing_ok=True)
            self._take_result()

    @property
    def is_complete(self) -> bool:
        """Whether the output file is there."""
        return self.path.exists()

    @property
    def num_done(self) -> int:
        """Records with an answer, or skipped, by any process."""
        return self.num_answered + len(self.skipped)

    def share(self) -> list[int]:
        """Indices of the records that this process has yet to answer."""
        return [index for index in range(self.rank, len(self.records), self.world_size) if self._begins[index] < 0]

    def update(self) -> None:
        """Reads what all processes have added."""
        for path in self._found_journals():
            if path not in self._read_to:
                self._read_to[path] = 0
                self._journals.append(path)
            for begin, entry, line in entries(path, self._read_to[path]):
                self._read_to[path] = begin + len(line)
                self._note(entry, path, begin)

    def _note(self, entry: dict[str, Any], path: Path, begin: int) -> None:
        index = self.records.index_of(entry["line"])
        if self._begins[index] >= 0:
            return
        self._begins[index], self._of[index] = begin, self._journals.index(path)
        if "error" in entry:
            self.skipped[entry["line"]] = entry["error"]
        else:
            self.num_answered += 1
            self.num_tokens += (entry.get("usage") or {}).get("completion_tokens", 0)

    def finish(self) -> None:
        """Writes the output file, when all records are done, and removes the journals."""
        draft = self.path.with_name(f"{self.path.name}.ordered")
        files = [path.open("rb") for path in self._journals]
        with draft.open("wb") as output:
            for line, journal, begin in zip(self.records.lines, self._of, self._begins, strict=True):
                if line not in self.skipped:
                    files[journal].seek(begin)
                    output.write(files[journal].readline())
            output.flush()
            os.fsync(output.fileno())
        for file in files:
            file.close()
        result = {"answered": self.num_answered, "completion_tokens": self.num_tokens}
        skipped = [{"line": line, "error": error} for line, error in sorted(self.skipped.items())]
        self._write_about(self._run | {"result": result | {"skipped": skipped}})
        if self.path.exists():
            raise ValueError(
                f"{str(self.path)!r} has been made by another program. The answers are in {str(draft)!r}."
            )
        draft.rename(self.path)
        self._remove_journals()

    def _remove_journals(self) -> None:
        for path in self._found_journals():
            path.unlink(missing_ok=True)

    # ---------------------------------------------------------------------------------------------------- which run

    def _check(self) -> None:
        if not self.path.parent.is_dir():
            raise OSError(f"There is no folder {str(self.path.parent)!r}. Make it first.")
        if self.path.exists() and self.path.samefile(self.records.path):
            raise ValueError(f"{str(self.path)!r} is the input. Name another output file.")
        if self.path.exists() and not self._about.exists():
            raise ValueError(
                f"{str(self.path)!r} is there already, and of no run that can be told. Name another output file."
            )
        if self.rank == 0 and not self._about.exists():
            if left := self._found_journals():
                raise ValueError(f"{str(left[0])!r} is of a run that cannot be told. Name another output file.")
            self._write_about(self._run)
        until = time.monotonic() + SECONDS_FOR_RANK_0
        while not self._about.exists():
            if time.monotonic() > until:
                raise ValueError(f"{str(self._about)!r} is not there: rank 0 does not run, or in another folder.")
            time.sleep(0.1)
        different = _difference(self._read_about(), self._run)
        if different is not None:
            raise ValueError(
                f"{str(self._about)!r} is of another run: {different}. Name another output file, or remove this one "
                f"with {self.path.name} and {self.path.name}.part*."
            )

    def _found_journals(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part[0-9]*"))

    def _read_about(self) -> dict[str, Any]:
        try:
            found = json.loads(self._about.read_bytes())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{str(self._about)!r} is damaged. Name another output file.")
        return found

    def _write_about(self, run: dict[str, Any]) -> None:
        draft = self._about.with_name(f"{self._about.name}.new")
        with draft.open("w") as file:
            json.dump(run, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._about)

    def _take_result(self) -> None:
        result = self._read_about().get("result") or {}
        self.num_answered, self.num_tokens = result.get("answered", 0), result.get("completion_tokens", 0)
        self.skipped = {one["line"]: one["error"] for one in result.get("skipped", ())}


def _difference(found: dict[str, Any], run: dict[str, Any]) -> str | None:
    """In what two runs differ; None for the same."""
    if found.get("input") != run["input"]:
        return "its input was another, or has changed"
    before, now = found.get("options") or {}, run["options"]
    for name in dict.fromkeys((*now, *before)):
        if before.get(name) != now.get(name):
            return f"its `{name}` was {before.get(name)!r}, and is {now.get(name)!r} now"
    return None
