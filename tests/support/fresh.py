"""
Programs as in a new interpreter that has imported torch and transformers, and nothing of this library. Importing the
two takes longer than all that such programs do: one process does it, and forks for each program.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NoReturn


TESTS = Path(__file__).parents[1]
PRELOADED = """
import torch
import torch._dynamo
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import CandidateGenerator
"""


def run_python(code: str) -> str:
    """
    What a process prints that runs this code, with `support` and hf_specdec to be imported.

    Raises:
        AssertionError: if the code raises; with its traceback.
    """
    forks = _forks()
    forks.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
    forks.stdin.flush()
    answer = forks.stdout.readline()
    assert answer, "the process that forks has ended"
    passed, printed = json.loads(answer)
    assert passed, printed
    return printed


@cache
def _forks() -> subprocess.Popen:
    """The process that forks. It ends with its standard input."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)
    return process


def _serve() -> None:
    """Forks for every line of standard input, one after the other."""
    sys.path.pop(0)  # this folder
    exec(PRELOADED, {})
    assert not any(name.partition(".")[0] == "hf_specdec" for name in sys.modules)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            if (child := os.fork()) == 0:
                run_and_exit(partial(_run, json.loads(line)), output.fileno(), errors.fileno())
            _, status = os.waitpid(child, 0)
            read = output if status == 0 else errors
            read.seek(0)
            print(json.dumps([status == 0, read.read()]), flush=True)


def _run(code: str) -> None:
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


def run_and_exit(program: Callable[[], None], output: int, errors: int) -> NoReturn:
    """
    Runs a program, as a forked process does, and ends the process: with status 0, or with 1 and a traceback if the
    program raises. It reads nothing; what it prints goes to these open files.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    status = 1
    try:
        program()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
