"""`hf-specdec generate-file`, as its users run it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.benchmarking import HEAD, invoke
from support.bulk import lines_of
from support.goldens import save_chat_target, trained_prompts, trained_target, trained_tokenizer
from transformers import AutoTokenizer

from hf_specdec.serving.engine import EngineOptions, StartError


for package in ("fastapi", "uvicorn", "openai", "prometheus_client"):
    pytest.importorskip(package)

NUMBER, LENGTH = 40, 120


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device-map", "auto", "--device", "cpu"], "is not for --device"),
        (["--target", "no/such/folder/here"], "--target"),
        (["--tree", "no tree"], "--tree"),
        (["--lora", "x"], "is not NAME=FOLDER"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    result = invoke("generate-file", prompts, tmp_path / "out.jsonl", *options)
    assert result.exit_code == 2 and message in result.output
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


def test_files_that_are_refused(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("Once upon a time\n")
    result = invoke("generate-file", prompts, output)
    assert result.exit_code == 2 and "PROMPTS" in result.output and "is no file of JSON lines" in result.output
    prompts.write_text('{"prompt": "a"}\n')
    output.write_text("mine")
    result = invoke("generate-file", prompts, output)
    assert result.exit_code == 2 and "OUTPUT" in result.output and "is there already" in result.output
    assert output.read_text() == "mine" and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    "options, kept", [([], None), (["--compile"], "here"), (["--compile", "--compile-cache", "off"], None)]
)
def test_compiled_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], kept: str | None
) -> None:
    """As `serve` keeps it, where code is compiled."""
    found = []

    def answering(options: EngineOptions, **about: Any) -> Any:
        found.append(options.compile_cache)
        raise StartError("--draft", "enough")

    monkeypatch.setattr("hf_specdec.bulk.answering", answering)
    monkeypatch.setattr("hf_specdec.compiling.kept.compile_cache_of", lambda option: None if option else "here")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    result = invoke("generate-file", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", "--device", "cpu", *options)
    assert "enough" in result.output and found == [kept]


# --------------------------------------------------------------------------------------------- in processes of its own


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A file of prompts, one of them bad, and the arguments for its target."""
    folder = tmp_path_factory.mktemp("job")
    target = save_chat_target(folder / "target")
    records: list[Any] = [{"prompt": text, "max_tokens": LENGTH, "temperature": 0} for text in texts()]
    records[5] |= {"max_tokens": 0}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--target", str(target), "--draft", str(HEAD), "--device", "cpu", "--num-blocks", "64"]
    return folder / "prompts.jsonl", [*options, "--max-requests", "4", "--records-at-once", "6"]


def texts() -> list[str]:
    prompts = trained_prompts()["prompts"]
    return [trained_tokenizer().decode(prompts[place % len(prompts)][: 4 + place]) for place in range(NUMBER)]


def started(output: Path, job: tuple[Path, list[str]], *launcher: str) -> subprocess.Popen[str]:
    command = [sys.executable, *(launcher or ("-m", "hf_specdec.cli")), "generate-file", str(job[0]), str(output)]
    log = output.with_suffix(".log").open("a")
    return subprocess.Popen([*command, *job[1]], stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def check(output: Path, job: tuple[Path, list[str]]) -> None:
    """Compares all answers with plain `generate`."""
    answers = lines_of(output)
    assert [answer["line"] for answer in answers] == [line for line in range(1, NUMBER + 1) if line != 6]
    tokenizer = AutoTokenizer.from_pretrained(job[1][1])
    for answer in answers[::6]:
        inputs = tokenizer(texts()[answer["line"] - 1], return_tensors="pt")
        text = trained_target().generate(**inputs, do_sample=False, max_new_tokens=LENGTH)
        new = tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer["choices"][0]["text"] == new
    about = json.loads(output.with_name(f"{output.name}.run.json").read_text())
    (skipped,) = about["result"]["skipped"]
    assert skipped["line"] == 6 and "`max_tokens`" in skipped["error"]
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl", "out.jsonl.run.json", "out.log"]


@pytest.mark.slow
def test_killed_several_times(job: tuple[Path, list[str]], tmp_path: Path) -> None:
    """As soon as some more answers are there: by SIGKILL, Ctrl-C and SIGTERM; the last run is left alone."""
    output, journal, counts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part0", [0]
    rng = random.Random(0)
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        process, until = started(output, job), counts[-1] + rng.randint(1, 6)
        while process.poll() is None and count(journal) < until:
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(60) != 0
        counts.append(count(journal))
    assert counts == sorted(set(counts)), counts
    process = started(output, job)
    assert process.wait(400) == 3
    check(output, job)
    log = output.with_suffix(".log").read_text()
    assert log.count("The same command goes on.") == 1 and log.count("line 6: skipped. `max_tokens`") >= 1
    assert "nanobind" not in log
    assert f"{NUMBER - 1} answers of {(NUMBER - 1) * LENGTH} tokens, 1 bad records skipped" in log


def count(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@pytest.mark.slow
def test_several_processes(job: tuple[Path, list[str]], tmp_path: Path) -> None:
    """By torchrun, as `accelerate launch` runs processes on several GPUs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hf_specdec.cli"]
    process = started(tmp_path / "out.jsonl", job, *launcher)
    parts, seen = [tmp_path / f"out.jsonl.part{rank}" for rank in range(2)], 0
    while process.poll() is None:
        seen = max(seen, sum(part.exists() for part in parts))
        time.sleep(0.05)
    assert seen == 2 and process.returncode == 0
    check(tmp_path / "out.jsonl", job)


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    """As a user begins: the default target, with a chat and a text."""
    prompts = tmp_path / "prompts.jsonl"
    chat = {"id": "c", "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    prompts.write_text(json.dumps(chat) + "\n" + json.dumps({"prompt": "The capital of France is", "max_tokens": 4}))
    process = started(tmp_path / "out.jsonl", (prompts, ["--device", "cpu", "--num-blocks", "64"]))
    assert process.wait(240) == 0
    first, second = lines_of(tmp_path / "out.jsonl")
    assert first["id"] == "c" and first["choices"][0]["message"]["content"]
    assert "Paris" in second["choices"][0]["text"]
