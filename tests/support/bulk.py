"""Bulk jobs whose answers are known, in processes that may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_specdec.bulk import Job, Output, Records
from hf_specdec.serving.errors import RequestRefused


OPTIONS = {"target": "tiny"}
STATE = SimpleNamespace(speculation=SimpleNamespace(num_drafts=2, num_accepted_tokens=3))


class Echo:
    """Answers each record with its prompt, a while later; the prompt `bad` is refused."""

    engine = SimpleNamespace(state=STATE)

    def __init__(self, seconds: float = 0.0):
        self._seconds = seconds
        self.asked: list[str] = []

    async def answer(self, record: bytes) -> dict[str, Any]:
        prompt = json.loads(record)["prompt"]
        self.asked.append(prompt)
        await asyncio.sleep(self._seconds * (1 + len(self.asked) % 3))
        if prompt == "bad":
            raise RequestRefused("it is bad")
        return {"choices": [{"text": prompt * 50}], "usage": {"completion_tokens": 1}}


def write_prompts(path: Path, number: int) -> None:
    """A file of so many records, every seventh of which is bad."""
    texts = ("bad" if place % 7 == 6 else f"p{place}ü" for place in range(number))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def expected(number: int) -> list[dict[str, Any]]:
    """The lines of the output for `write_prompts`."""
    return [
        {"line": place + 1, "choices": [{"text": f"p{place}ü" * 50}], "usage": {"completion_tokens": 1}}
        for place in range(number)
        if place % 7 != 6
    ]


def run_job(prompts: Path, output: Path, answers: Any, rank: int = 0, world_size: int = 1, **options: Any) -> Output:
    """Runs the share of one process to its end."""
    run = Output(output, Records(prompts), OPTIONS, rank, world_size)
    if not run.is_complete:
        asyncio.run(Job(run, answers, 4, **options).run())
    return run


def forked_job(prompts: Path, output: Path, seconds: float, rank: int = 0, world_size: int = 1) -> int:
    """The id of a process that runs a share, and ends with status 0 if it has been completed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run_job(prompts, output, Echo(seconds), rank, world_size)
            status = 0
        finally:
            os._exit(status)
    return child


def kill_after(children: list[int], seconds: float) -> list[int]:
    """Kills processes after a while; the exit codes of all, negative of those that were killed."""
    time.sleep(seconds)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
