"""Scripts that run in several processes, one per rank, and what each of them found."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


SECONDS = 240


def results_of_ranks(script: Path, folder: Path, device: str, num_ranks: int = 2) -> list[dict[str, Any]]:
    """
    Runs `script FOLDER` under torchrun, with gloo on the CPU or nccl on as many GPUs, and reads what each rank wrote
    with `write_result`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Before what is there already: where the package is not installed, it is found by that.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, str(script), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script.name} failed:\n{_ends(done.stdout)}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def say_where_if_stuck() -> None:
    """Called by a script: ranks that wait for each other for ever end with what each is waiting in."""
    faulthandler.dump_traceback_later(SECONDS - 60, exit=True)


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Keeps what this rank found."""
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result, default=_plain))


def _ends(output: str, most: int = 6000) -> str:
    """
    The beginning and the end of what all ranks have printed: the rank that failed first says so before the others have
    noticed, and theirs are the longer tracebacks.
    """
    return output if len(output) <= 2 * most else f"{output[:most]}\n[…]\n{output[-most:]}"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not for JSON")
