"""Scripts that run in several processes, one per rank, and what each of them found."""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .fresh import run_and_exit, run_python


SECONDS = 240


def results_of_ranks(script: Path, folder: Path, device: str, num_ranks: int = 2) -> list[dict[str, Any]]:
    """
    Runs `script FOLDER` in a process for each rank, on the CPU with gloo, or on as many GPUs with nccl, and reads what
    each rank wrote with `write_result`. The processes are those of torchrun; without GPUs they are forked, which saves
    the imports of each.
    """
    if device == "cpu":
        run_python(f"from support.ranks import fork_ranks\nfork_ranks({str(script)!r}, {str(folder)!r}, {num_ranks})")
    else:
        _run_by_torchrun(script, folder, num_ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def _run_by_torchrun(script: Path, folder: Path, num_ranks: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Before what is there already: where the package is not installed, it is found by that.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
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


def fork_ranks(script: str, folder: str, num_ranks: int) -> None:
    """Forks a process for each rank, with the variables that torchrun sets; when one fails, ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.argv = [script, folder]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    logs, running, failed = [Path(folder, f"rank{rank}.log") for rank in range(num_ranks)], set(), False
    for rank, log in enumerate(logs):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            run_and_exit(partial(runpy.run_path, script, run_name="__main__"), output, output)
        running.add(child)
    while running:
        child, status = os.wait()
        running.remove(child)
        if status != 0 and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    if failed:
        printed = "\n".join(f"{log.name}:\n{_ends(log.read_text(errors='replace'))}" for log in logs)
        raise RuntimeError(f"{script} failed:\n{printed}")


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
