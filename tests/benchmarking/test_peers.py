"""benchmarks/peers/: adapters against stand-ins of their peers, our contenders against transformers' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import compare_peers
import pytest
from peers import results, worker
from peers.contenders import CONTENDERS
from peers.engines import sglang_engine, vllm_engine
from peers.job import Answers, Job
from peers.preparing import random_head, random_target
from peers.report import share_of_same, with_shares
from peers.worker import cells
from support.graphs import install_stand_in
from support.peer_engines import FakeEagle, continued, fake_sglang, fake_vllm


PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [11, 12]]


def job_of(**options: Any) -> Job:
    heads = {"specforge": "head", "safeailab": "head"}
    given = {"target": "target", "dtype": "float32", "device": "cpu", "prompts": PROMPTS, "heads": heads}
    sizes = {"open": [1, 2], "temperatures": [0.0, 1.0], "new_tokens": 7, "turns": 2, "warm_up": 1}
    return Job(**(given | sizes | {"prompts_per_turn": 3, "eagle_code": "code"} | options))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    eagle: Any = ModuleType("eagle.model.ea_model")
    eagle.EaModel = FakeEagle
    modules = {"vllm": fake_vllm(), "sglang": fake_sglang(), "eagle.model.ea_model": eagle}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("LEN", "METHOD", "TOKEN_MODE"):  # set by an adapter, and to be as they were
        monkeypatch.setenv(f"SGLANG_SIMULATE_ACC_{name}", "")
        monkeypatch.delenv(f"SGLANG_SIMULATE_ACC_{name}")


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = job_of(arguments={"vllm-plain": {"enforce_eager": True}})
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job and job.longest == 11


def test_batches_cover_the_prompts() -> None:
    """Every turn has as many prompts as are open at least, in full batches."""
    job = job_of()
    assert job.batches(1) == [[prompt] for prompt in PROMPTS]
    assert job.batches(2) == [PROMPTS[:2], [PROMPTS[2], PROMPTS[0]]]
    assert job.batches(4) == [[*PROMPTS, PROMPTS[0]]]


PEERS = ["vllm-plain", "vllm-chain", "sglang-plain", "sglang-chain", "sglang-tree", "eagle-tree"]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("length", [None, 3.0])
@pytest.mark.parametrize("name", PEERS)
def test_adapters(name: str, length: float | None) -> None:
    """They name nothing that the peer does not have, and return its tokens and its counts."""
    if name == "eagle-tree" and length is not None:
        pytest.skip("it has no such switch")
    job = job_of(acceptance_length=length, is_random=length is not None)
    engine = CONTENDERS[name].start(name, job)
    batch = PROMPTS[:1] if name == "eagle-tree" else PROMPTS
    for temperature in (0.0, 1.0):
        answers = engine.generate(batch, temperature)
        assert [text[:7] for text in answers.tokens] == [continued(prompt, 7) for prompt in batch]
        if name.endswith("plain"):
            assert answers.drafts is None
        else:
            assert answers.drafts and answers.accepted == 2 * answers.drafts
    json.dumps(engine.ran_with)
    engine.close()


@pytest.mark.usefixtures("stand_ins")
def test_arguments_reach_the_engine() -> None:
    job = job_of(arguments={"vllm-plain": {"no_such_argument": 1}})
    with pytest.raises(TypeError, match="no_such_argument"):
        CONTENDERS["vllm-plain"].start("vllm-plain", job)
    CONTENDERS["vllm-chain"].start("vllm-chain", job)


@pytest.mark.usefixtures("stand_ins")
def test_switches_of_a_set_acceptance() -> None:
    job = job_of(acceptance_length=3.5, is_random=True)
    speculation = vllm_engine.engine_arguments("chain", job)["speculative_config"]
    assert speculation["rejection_sample_method"] == "synthetic" and speculation["synthetic_acceptance_length"] == 3.5
    assert vllm_engine.engine_arguments("chain", job)["load_format"] == "dummy"
    assert "speculative_config" not in vllm_engine.engine_arguments("plain", job)
    assert sglang_engine.environment("plain", job) == sglang_engine.environment("chain", job_of()) == {}
    CONTENDERS["sglang-chain"].start("sglang-chain", job)
    names = [f"SGLANG_SIMULATE_ACC_{name}" for name in ("LEN", "METHOD", "TOKEN_MODE")]
    given: Any = sys.modules["sglang"]
    assert [given.variables[name] for name in names] == ["3.5", "match-expected", "real-draft-token"]
    assert sglang_engine.environment("tree", job)[names[2]] == "fixed"  # SGLang refuses drafts' tokens in trees


def test_what_is_done() -> None:
    """Failed cells are not, but for those that a contender cannot have."""
    failed = [{"temperature": 0.0, "open": number, "error": "no"} for number in (1, 2)]
    for name, done in (("hf-plain", set()), ("hf-lookup", {(0.0, 2)})):
        lines = [cell | {"contender": name} for cell in failed]
        assert results.done_of(lines, name) == done
        later = {"contender": name, "temperature": 0.0, "open": 1, "tokens_per_second": 1.0}
        assert results.done_of([*lines, later], name) == done | {(0.0, 1)}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("hf-lookup", {"open": [2, 3]}, "one request at a time"),
        ("hf-assisted", {}, "--assistant"),
        ("hf-lookup", {"is_random": True}, "random weights"),
        ("ours-auto", {"is_random": True}, "random weights"),
        ("eagle-tree", {"eagle_code": None}, "--eagle-code"),
    ],
)
def test_reasons_to_leave_one_out(name: str, options: dict[str, Any], reason: str) -> None:
    assert reason in (CONTENDERS[name].reason_against(job_of(**options)) or "")
    assert CONTENDERS["ours-tree"].reason_against(job_of(**options)) is None


class Counting:
    """An engine that fails with two requests, and counts its calls."""

    ran_with: dict[str, Any] = {"transformers": "5"}
    serves_several = False

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        if len(prompts) > 1 and not self.serves_several:
            raise ValueError("one at a time")
        self.calls += 1
        return Answers([continued(prompt, 4) for prompt in prompts], 2, 2 + 2 * (self.calls % 2))

    def close(self) -> None:
        pass


def test_cells_of_a_worker() -> None:
    """Warm-up is not counted; a cell that fails does not end the others; no turn begins late, but one is timed."""
    engine = Counting()
    found = list(cells(engine, job_of(temperatures=[0.0])))
    assert engine.calls == (1 + 2) * 3
    assert found[0]["open"] == 1 and len(found[0]["of_turns"]) == 2 and found[0]["acceptance_length"] == 2.5
    assert found[0]["texts"] == [continued(prompt, 4) for prompt in PROMPTS]
    assert found[1] == {"temperature": 0.0, "open": 2, "error": "ValueError: one at a time"}
    alone = list(cells(engine, job_of(temperatures=[0.0]), serves=CONTENDERS["hf-lookup"].serves))
    assert alone[1]["error"] == "it serves one request at a time"
    late = next(cells(Counting(), job_of(seconds=0.0)))
    assert len(late["of_turns"]) == 1


def test_shares() -> None:
    """Cells are compared with the first that has them; texts as far as both go."""
    cell = {"temperature": 0.0, "open": 2, "acceptance_length": None, "of_turns": [1.0]}
    first = cell | {"contender": "hf-plain", "tokens_per_second": 10.0, "texts": [[1, 2], [3, 4]]}
    other = cell | {"contender": "ours-tree", "tokens_per_second": 30.0, "texts": [[1, 2, 9], [3, 5]]}
    failed = {"contender": "hf-static", "temperature": 0.0, "open": 2, "error": "no"}
    found = with_shares([failed, first, other | {"acceptance_length": 3.0}])
    assert found[0] == failed
    assert [found[2][name] for name in ("over_first", "steps_per_second", "same_texts")] == [3.0, 5.0, 0.5]
    assert share_of_same([], []) is None


@pytest.fixture(scope="module")
def tiny_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("peers")
    target = random_target("tiny", "float32", folder / "target")
    head = random_head("tiny", "float32", "cpu", folder / "head")
    return job_of(target=target, heads={"hf_specdec": head}, is_random=True)


OWN = ["hf-static", "hf-lookup", "hf-batching", "ours-plain", "ours-chain", "ours-tree", "ours-auto"]


@pytest.fixture(scope="module")
def expected(tiny_job: Job) -> dict[int, list[list[int]]]:
    engine = CONTENDERS["hf-plain"].start("hf-plain", tiny_job)
    return {number: engine.generate(PROMPTS[:number], 0.0).tokens for number in (1, 3)}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.some_cases(1)
def test_own_contenders_say_what_plain_generate_says(
    name: str, tiny_job: Job, expected: dict[int, list[list[int]]]
) -> None:
    """The same random weights, whoever draws them; texts of full length."""
    engine = CONTENDERS[name].start(name, tiny_job)
    for number, texts in expected.items():
        if name == "hf-lookup" and number > 1:
            continue  # transformers refuses it
        answers = engine.generate(PROMPTS[:number], 0.0)
        assert answers.tokens == texts and all(len(text) == 7 for text in texts)
        sampled = engine.generate(PROMPTS[:number], 1.0).tokens
        assert [len(text) for text in sampled] == [7] * number
        if answers.drafts and name in ("hf-lookup", "ours-chain"):  # "default" and "auto" have plain steps, too
            # The first token of a text is of no step.
            assert answers.drafts + (answers.accepted or 0) == 6 * number
    engine.close()


def test_steps_that_cannot_be_told_are_refused(tiny_job: Job) -> None:
    engine = CONTENDERS["ours-chain"].start("ours-chain", replace(tiny_job, acceptance_length=3.5))
    with pytest.raises(RuntimeError, match="tokens, not 3.5"):
        engine.generate(PROMPTS[:1], 0.0)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours-chain", "ours-tree"])
def test_set_acceptance(name: str, tiny_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and several, greedy and sampled; of 36 tokens after the first, steps of 3 leave none."""
    install_stand_in(monkeypatch, with_kernel=True)
    engine = CONTENDERS[name].start(name, replace(tiny_job, acceptance_length=3.0, new_tokens=37))
    for number in (1, 3):
        for temperature in (0.0, 1.0):
            answers = engine.generate(PROMPTS[:number], temperature)
            assert answers.drafts == 12 * number and answers.accepted == 24 * number
    engine.close()


SHAPE = "--shape tiny --acceptance-length 3 --input-len 9 --device cpu --warm-up 0 --turns 1".split()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contenders whose processes were begun: "ours-tree" fails after its first cell, as long as it is new."""
    names: list[str] = []

    def run(name: str, python: str, job_file: Path, output: Path, *_: Any) -> str | None:
        job, is_new = Job.read(job_file), name not in names
        names.append(name)
        assert job.acceptance_length == 3.0 and len(job.prompts[0]) == 9
        if name == "ours-tree" and is_new:
            results.append(output, {"contender": name} | next(cells(Counting(), job)))
            with output.open("a") as file:
                file.write('{"contender": "ours-tree", "tempera')  # cut
            return "out of memory"
        monkeypatch.setitem(sys.modules, "peers.engines.counted", counted)
        monkeypatch.setitem(CONTENDERS, name, replace(CONTENDERS[name], family="counted"))
        worker.main(name, str(job_file), str(output))
        monkeypatch.setitem(CONTENDERS, name, replace(CONTENDERS[name], family=name.split("-")[0]))
        return None

    counted: Any = ModuleType("peers.engines.counted")
    counted.start = lambda *_: Counting()
    monkeypatch.setattr(compare_peers, "run", run)
    return names


@pytest.mark.slow
def test_the_command(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A table, a picture and one JSON line, whatever becomes of the contenders; the next command goes on, and tries what
    has failed again.
    """
    output, lines_in = tmp_path / "peers.png", tmp_path / "peers.jsonl"
    names = ["hf-plain", "ours-tree", "hf-lookup", "vllm-plain"]
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    other = ["--interpreters", f"vllm_engine={tmp_path / 'python'}", "--open", "1", "2"]
    files = ["--output", str(output), "--results", str(lines_in)]
    command = [*SHAPE, *other, *files, "--contenders", *names]
    compare_peers.main(command)
    assert output.read_bytes()[:4] == b"\x89PNG"
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["left_out"]["ours-tree"] == "out of memory" and "vllm" in found["left_out"]["vllm-plain"]
    assert "random weights" in found["left_out"]["hf-lookup"]
    errors = [cell.get("error") for cell in found["results"]]
    assert errors == [None, "ValueError: one at a time"] * 2 + [None]
    assert found["ran_with"]["hf-plain"]["transformers"] == "5"
    assert any("transformers, generate" in line and "greedy" not in line for line in lines)
    ways = "greedy, 2 open; T = 1, 2 open"
    assert sum(line == f"transformers, generate ({ways}): ValueError: one at a time" for line in lines) == 1

    compare_peers.main(command)
    assert ran == ["hf-plain", "ours-tree"] * 2
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    errors = [cell.get("error") for cell in found["results"]]
    assert errors == [None, "ValueError: one at a time"] * 4  # it has failed again
    assert list(found["left_out"]) == ["hf-lookup", "vllm-plain"]
    measured = [cell for cell in found["results"] if "error" not in cell]

    monkeypatch.setattr(Counting, "serves_several", True)
    compare_peers.main(command)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["results"]) == 8 and not any("error" in cell for cell in found["results"])
    assert all(cell in found["results"] for cell in measured)  # not measured again
    compare_peers.main(command)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ran == ["hf-plain", "ours-tree"] * 3

    output.unlink()
    compare_peers.main([*files, "--render", str(lines_in), "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert len(ran) == 6 and output.exists() and json.loads(lines[-1]) == found
    assert "| tokens/s | greedy, 1 open | greedy, 2 open | T = 1, 1 open | T = 1, 2 open |" in lines
    assert sum(line.startswith("| hf_specdec, tree | ") for line in lines) == 1

    with pytest.raises(SystemExit, match="peers.jsonl is of another job: `turns` was 1 and is 2. Name another file"):
        compare_peers.main([*command, "--turns", "2"])
    with pytest.raises(SystemExit, match="no results in .*nothing.jsonl"):
        compare_peers.main(["--render", str(tmp_path / "nothing.jsonl")])


def test_the_end_of_the_time(tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--output", str(tmp_path / "peers.png"), "--results", str(tmp_path / "peers.jsonl")]
    compare_peers.main([*SHAPE, *files, "--open", "1", "--contenders", "hf-plain", "--seconds-in-all", "0"])
    assert not ran and json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == {
        "hf-plain": "no time was left"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shape tiny", "go together"),
        ("--render", "expected at least one argument"),
        ("--arguments vllm {}", "no contender vllm"),
        ("--interpreters vllm=python", "no family vllm"),
    ],
)
def test_bad_arguments(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_peers.parse_arguments(words.split())
    assert message in capsys.readouterr().err


def test_a_contender_that_hangs_or_fails(tmp_path: Path) -> None:
    """Its processes end; the last line that it has printed says why."""
    script, output = tmp_path / "python", tmp_path / "peers.jsonl"
    script.write_text('#!/bin/sh\n[ "$3" = hf-plain ] && sleep 60\necho Broken >&2\nexit 3\n')
    script.chmod(0o755)
    run = compare_peers.run
    assert run("hf-plain", str(script), tmp_path / "job.json", output, 1.0, tmp_path / "log") == "not ready after 1 s"
    assert run("hf-static", str(script), tmp_path / "job.json", output, 60.0, tmp_path / "log") == "Broken"


@pytest.mark.slow
def test_a_command_that_is_ended_ends_its_contender(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` sends it: nothing goes on in the background."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho $$ > {tmp_path}/pid\nexec sleep 60\n')
    script.chmod(0o755)
    command = [sys.executable, compare_peers.__file__, *SHAPE, "--contenders", "hf-plain", "--open", "1"]
    files = ["--results", str(tmp_path / "peers.jsonl"), "--interpreters", f"hf={script}"]
    process = subprocess.Popen([*command, *files], stdout=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() or not (text := (tmp_path / "pid").read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(text), 0)
