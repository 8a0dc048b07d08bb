"""Runs that are killed go on where they were, and no run touches the files of another."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest


pytest.importorskip("fastapi")
pytest.importorskip("openai")

from support.bulk import (  # noqa: E402
    OPTIONS,
    Echo,
    expected,
    forked_job,
    kill_after,
    lines_of,
    run_job,
    write_prompts,
)

from hf_specdec.bulk import Output, Records  # noqa: E402
from hf_specdec.bulk.answers import EngineFailed, RecordFailed  # noqa: E402


NUMBER = 120


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "prompts.jsonl", NUMBER)
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out[1].jsonl"


def files_beside(output: Path) -> list[str]:
    return sorted(path.name for path in output.parent.iterdir() if path.name.startswith(output.name))


def test_bad_records_are_named(prompts: Path, output: Path) -> None:
    named: list[tuple[int, str]] = []
    run = run_job(prompts, output, Echo(), tell_bad=lambda line, reason: named.append((line, reason)))
    assert lines_of(output) == expected(NUMBER)
    assert sorted(named) == [(line, "it is bad") for line in range(7, NUMBER + 1, 7)]
    assert run.num_answered == len(expected(NUMBER)) == run.num_tokens
    assert files_beside(output) == [output.name, f"{output.name}.run.json"]
    again = run_job(prompts, output, None)
    assert (again.skipped, again.num_answered, again.num_tokens) == (run.skipped, run.num_answered, run.num_tokens)


@pytest.mark.parametrize("sizes", [[1], [2], [1, 2, 3]], ids=str)
@pytest.mark.some_cases(1)
def test_killed_at_any_moment(prompts: Path, output: Path, sizes: list[int]) -> None:
    """By one process, by several, and by another number of them each time."""
    rng, runs, codes = random.Random(len(sizes)), 0, [1]
    while any(codes):
        size = sizes[runs % len(sizes)]
        children = [forked_job(prompts, output, 0.01, rank, size) for rank in range(size)]
        seconds = rng.uniform(0.01, 0.15) if runs < 8 else 5.0
        codes = kill_after(children, seconds) if runs < 8 else _ends(children)
        assert all(code in (0, -9) for code in codes)
        runs += 1
    assert runs > 2
    assert lines_of(output) == expected(NUMBER)
    assert files_beside(output) == [output.name, f"{output.name}.run.json"]


def _ends(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.parametrize("torn", [b'{"line": 3, "choi', b"\0\0\0\n\0\0", b'{"line": 3}\xff\n'], ids=str)
def test_what_was_being_written_is_written_again(prompts: Path, output: Path, torn: bytes) -> None:
    journal = output.with_name(f"{output.name}.part0")
    with pytest.raises(EngineFailed, match="line 50: broken"):
        run_job(prompts, output, Breaks(50))
    whole = journal.read_bytes()
    journal.write_bytes(whole + torn)
    answers = Echo()
    run_job(prompts, output, answers)
    assert lines_of(output) == expected(NUMBER)
    assert len(answers.asked) == NUMBER - whole.count(b"\n"), "no record is answered twice"


class Breaks(Echo):
    """Fails at a record, as an engine that has ended does."""

    def __init__(self, line: int):
        super().__init__()
        self._prompt = f"p{line - 1}ü"

    async def answer(self, record: bytes) -> dict[str, Any]:
        if json.loads(record)["prompt"] == self._prompt:
            raise EngineFailed("broken")
        return await super().answer(record)


class Fails(Echo):
    """Fails with some records, and goes on."""

    def __init__(self, lines: range, twice: bool = True):
        super().__init__()
        self.left = {f"p{line - 1}ü": 2 if twice else 1 for line in lines}

    async def answer(self, record: bytes) -> dict[str, Any]:
        prompt = json.loads(record)["prompt"]
        if self.left.get(prompt):
            self.left[prompt] -= 1
            raise RecordFailed("it has failed")
        return await super().answer(record)


@pytest.mark.parametrize("twice", [False, True])
def test_records_that_fail_again_are_skipped(prompts: Path, output: Path, twice: bool) -> None:
    """The last one, too, after which nothing is answered."""
    lines = {50, NUMBER} if twice else set()
    run = run_job(prompts, output, Fails(range(50, NUMBER + 1, NUMBER - 50), twice))
    assert lines_of(output) == [answer for answer in expected(NUMBER) if answer["line"] not in lines]
    assert {line for line, error in run.skipped.items() if error == "it has failed"} == lines


def test_an_engine_that_answers_none(prompts: Path, output: Path) -> None:
    """Stops, and the next one is asked for all of them."""
    with pytest.raises(EngineFailed, match="it has failed"):
        run_job(prompts, output, Fails(range(50, NUMBER + 1)))
    run_job(prompts, output, Echo())
    assert lines_of(output) == expected(NUMBER)


def test_killed_as_journals_are_removed(prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_job(prompts, output, Echo())
    assert len(files_beside(output)) == 3
    run_job(prompts, output, None)
    assert files_beside(output) == [output.name, f"{output.name}.run.json"]


def test_killed_as_the_output_is_written(prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_job(prompts, output, Echo())
    assert not output.exists()
    answers = Echo()
    run_job(prompts, output, answers)
    assert lines_of(output) == expected(NUMBER) and not answers.asked


# ------------------------------------------------------------------------------------------------- what is another run


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(prompts: Path, output: Path, options: dict[str, Any] = OPTIONS) -> str:
    """Why a run is refused, which leaves all files as they are."""
    before = snapshot(output.parent)
    with pytest.raises((OSError, ValueError)) as error:
        Output(output, Records(prompts), options)
    assert snapshot(output.parent) == before
    return str(error.value)


@pytest.mark.parametrize("is_complete", [False, True])
def test_the_output_of_another_run(prompts: Path, output: Path, is_complete: bool) -> None:
    if is_complete:
        run_job(prompts, output, Echo())
    else:
        with pytest.raises(EngineFailed):
            run_job(prompts, output, Breaks(50))
    assert "`target` was 'tiny', and is 'other' now" in refused(prompts, output, {"target": "other"})
    assert "`more` was None, and is 1 now" in refused(prompts, output, OPTIONS | {"more": 1})
    write_prompts(prompts, NUMBER + 1)
    assert "its input was another, or has changed" in refused(prompts, output)


def test_files_that_are_of_no_run(prompts: Path, output: Path) -> None:
    output.write_text("mine")
    assert "of no run that can be told" in refused(prompts, output)
    output.unlink()
    journal = output.with_name(f"{output.name}.part0")
    journal.write_text('{"line": 1}\n')
    assert "of a run that cannot be told" in refused(prompts, output)
    journal.unlink()
    output.with_name(f"{output.name}.run.json").write_text("{")
    assert "is damaged" in refused(prompts, output)
    assert "is the input" in refused(prompts, prompts)
    assert "There is no folder" in str(pytest.raises(OSError, Output, output / "no" / "x", Records(prompts), {}).value)


def test_a_run_that_runs(prompts: Path, output: Path) -> None:
    first = Output(output, Records(prompts), OPTIONS)
    assert "is written by another process" in refused(prompts, output)
    first.journal.close()


def test_a_file_that_appears_meanwhile_is_kept(prompts: Path, output: Path) -> None:
    class Writes(Echo):
        async def answer(self, record: bytes) -> dict[str, Any]:
            output.write_text("mine")
            return await super().answer(record)

    with pytest.raises(ValueError, match="made by another program"):
        run_job(prompts, output, Writes())
    assert output.read_text() == "mine"
    assert lines_of(output.with_name(f"{output.name}.ordered")) == expected(NUMBER)
