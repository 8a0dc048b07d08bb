"""The records of one process, answered, and the wait for those of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..serving.errors import RequestRefused
from .answers import EngineFailed, RecordFailed
from .outputs import Output


SECONDS_BETWEEN_LOOKS = 1.0
MOST_FAILED = 10
"""Records that may fail twice each, without an answer to another one, before the run stops: it is not their fault."""


class Answers(Protocol):
    """What answers records; see `Answering`."""

    engine: Any

    async def answer(self, record: bytes) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Progress:
    """
    How far a run is.

    Args:
        num_done (`int`): records that are answered or skipped.
        tokens_per_second (`float`): tokens of answers since this process began, of all processes.
        acceptance_length (`float`, *optional*): mean tokens per step of a request in this process; None before any.
    """

    num_done: int
    tokens_per_second: float
    acceptance_length: float | None


class Job:
    """
    Answers the records of this process. Rank 0 then waits for the others, and writes the output file.

    Args:
        output (`Output`): the output, which knows the input.
        answers (`Answers`): answers records.
        most_at_once (`int`): records that the engine has at once.
        tell (`Callable`, *optional*): called about once a second.
        tell_bad (`Callable`, *optional*): called with the line of each bad record and what is wrong with it.
    """

    def __init__(
        self,
        output: Output,
        answers: Answers,
        most_at_once: int,
        tell: Callable[[Progress], None] = lambda progress: None,
        tell_bad: Callable[[int, str], None] = lambda line, reason: None,
    ):
        self._output, self._answers, self._most = output, answers, most_at_once
        self._tell, self._tell_bad = tell, tell_bad
        self._failed: list[tuple[int, str]] = []
        """Lines and errors of records after whose failure none has been asked for and answered."""
        self._began = time.monotonic()
        self._tokens_before = output.num_tokens

    async def run(self) -> None:
        """
        Answers all. A record whose answer fails twice is skipped as a bad one is, if the engine answers others.

        Raises:
            EngineFailed: if the engine fails, or no record is answered. The same run can go on.
        """
        left = iter(self._output.share())
        watching = asyncio.ensure_future(self._watch())
        try:
            await self._answer_all(left)
            self._skip_failed(self._failed)
            self._output.update()
            lost = 0 if self._output.is_complete else len(self._output.share())
            if lost:
                raise OSError(f"{lost} answers cannot be read from what was written beside {self._output.path}.")
            while self._output.rank == 0 and self._output.num_done < len(self._output.records):
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
                self._output.update()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            if self._output.journal is not None:
                self._output.journal.close()
        if self._output.rank == 0:
            self._output.finish()

    async def _answer_all(self, left: Iterator[int]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._most):
                    group.create_task(self._answer_some(left))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _answer_some(self, left: Iterator[int]) -> None:
        journal, records = self._output.journal, self._output.records
        assert journal is not None
        for index in left:
            line, failed_before = records.lines[index], list(self._failed)
            try:
                found = await self._answer_or_retry(records.read(index))
            except RequestRefused as error:
                self._skip(line, str(error))
            except RecordFailed as error:
                self._failed.append((line, str(error)))
                if len(self._failed) >= MOST_FAILED:
                    raise EngineFailed(f"{records.path}, line {line}: {error}") from error
            except EngineFailed as error:
                raise EngineFailed(f"{records.path}, line {line}: {error}") from error
            else:
                journal.append({"line": line} | found)
                self._skip_failed(failed_before)

    async def _answer_or_retry(self, record: bytes) -> dict[str, Any]:
        try:
            return await self._answers.answer(record)
        except RecordFailed:
            return await self._answers.answer(record)

    def _skip_failed(self, failed: list[tuple[int, str]]) -> None:
        """Skips records of which it is known that the engine has answered one after them."""
        for one in failed:
            if one in self._failed:
                self._skip(*one)
        self._failed = [one for one in self._failed if one not in failed]

    def _skip(self, line: int, reason: str) -> None:
        assert self._output.journal is not None
        self._tell_bad(line, reason)
        self._output.journal.append({"line": line, "error": reason})

    async def _watch(self) -> None:
        """Reads what the processes have written, and tells of it."""
        while True:
            self._output.update()
            self._tell(await self._progress())
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def _progress(self) -> Progress:
        accepted = None
        with suppress(RuntimeError, TimeoutError):  # of an engine that has ended, which the records will tell
            state = await asyncio.to_thread(lambda: self._answers.engine.state)
            if state.speculation.num_drafts:
                accepted = 1 + state.speculation.num_accepted_tokens / state.speculation.num_drafts
        seconds = max(time.monotonic() - self._began, 1e-9)
        return Progress(self._output.num_done, (self._output.num_tokens - self._tokens_before) / seconds, accepted)
