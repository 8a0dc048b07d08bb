"""`hf-specdec train`: runs, options that are explained, runs that are killed, and several processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.goldens import TINY_TARGET
from support.training import losses_of
from typer.testing import CliRunner

from hf_specdec.cli import build_app
from hf_specdec.eagle import EagleHead
from hf_specdec.training.checkpoints import newest_complete


def arguments(output: Path, data: Path, *more: str) -> list[str]:
    values = ["train", "--output", str(output), "--data", str(data), "--target", str(TINY_TARGET), "--no-progress"]
    values += "--max-length 64 --batch-tokens 512 --rows-at-once 8 --eval-texts 8 --unroll-steps 3 --cpu".split()
    return [*values, "--logging-steps", "1", *more]


def test_the_command(tmp_path: Path, data: Path) -> None:
    command = arguments(tmp_path / "out", data, "--epochs", "0.5", "--aux-layer-ids", "1,3,6")
    result = CliRunner().invoke(build_app(), command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "simulated acceptance length" in result.output
    assert "EagleHead.from_pretrained" in result.output
    assert EagleHead.from_pretrained(tmp_path / "out").config.aux_layer_ids == [1, 3, 6]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--kind", "eagle9"], "eagle9"),
        (["--aux-layer-ids", "1,x"], "give numbers"),
        (["--aux-layer-ids", "1,3,60"], "does not have"),
        (["--self-generate", "5"], "Give one of"),
        (["--draft-vocab-size", "999"], "draft_vocab_size"),
        (["--dtype", "int8"], "dtype"),
        (["--target", "/no/such/folder"], "There is no folder '/no/such/folder'"),
    ],
)
def test_bad_options_are_explained(tmp_path: Path, data: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(build_app(), arguments(tmp_path / "out", data, *more), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow
def test_a_killed_run_continues_as_if_it_had_not_been(tmp_path: Path, data: Path) -> None:
    """SIGKILL in the middle, twice; checkpoints every half second. Losses and weights are those of one run."""
    more = ["--epochs", "12", "--save-minutes", "0.008", "--eval-steps", "1000"]

    def start(name: str) -> subprocess.Popen:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "hf_specdec.cli", *arguments(tmp_path / name, data, *more)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start("whole").wait(timeout=300) == 0
    seen = []
    for least in (12, 30):
        process = start("killed")
        until = time.monotonic() + 200
        while time.monotonic() < until and process.poll() is None:
            path = newest_complete(tmp_path / "killed", clean=False)
            if path is not None and int(path.name.split("-")[1]) >= least:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.append(int(newest_complete(tmp_path / "killed", clean=False).name.split("-")[1]))
    assert seen[1] > seen[0] >= 12
    assert start("killed").wait(timeout=300) == 0
    whole, killed = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed"))
    assert killed["finished"] and killed["step"] == whole["step"]
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")
    weights = [EagleHead.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """
    `accelerate launch`, both on the CPU with gloo: they write, train on halves of a batch, stop at a limit, continue.
    (accelerate's own `--cpu` starts one process where there is no MPI; ours keeps its `--multi_gpu` on the CPU.)
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(port)]
    command += ["--module", "hf_specdec.cli", "train", "--output", str(tmp_path / "out"), "--self-generate", "40"]
    command += ["--target", str(TINY_TARGET), "--no-progress", "--cpu", "--max-length", "64", "--batch-tokens", "512"]
    command += ["--eval-texts", "9", "--unroll-steps", "3", "--epochs", "60", "--logging-steps", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    steps, path = [], tmp_path / "out" / "result.json"
    for _ in range(20):
        process = subprocess.run(
            [*command, "--max-seconds", "6"], env=environment, capture_output=True, text=True, timeout=300
        )
        assert process.returncode == 0, process.stdout + process.stderr
        result = json.loads(path.read_text()) if path.is_file() else {"step": 0, "finished": False}
        steps.append(result["step"])
        if result["finished"]:
            break
    assert result["finished"] and len(steps) > 1 and steps == sorted(steps)
    assert result["after"]["eval_acceptance_length"] > result["before"]["eval_acceptance_length"] + 0.1
    files = sorted((tmp_path / "out" / "data").glob("written-*.jsonl"))
    jobs = [[json.loads(line)["job"] for line in file.read_text().splitlines()] for file in files]
    assert len(jobs) == 2 and sorted(jobs[0] + jobs[1]) == list(range(40)) and min(map(len, jobs)) >= 10
    assert sorted(losses_of(tmp_path / "out")) == list(range(1, result["total_steps"] + 1))
