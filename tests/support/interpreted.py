"""Programs in which Triton's kernels run by its interpreter, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


TESTS = Path(__file__).parents[1]


def run_interpreted(code: str, *folders: Path) -> list[str]:
    """
    The lines that a process of its own prints, which runs this code. Its `sys.argv[1:]` are these folders and the
    tests'.

    Raises:
        AssertionError: if the code raises; with what it wrote to standard error.
    """
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, folders), str(TESTS)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
