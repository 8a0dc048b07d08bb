"""Running the commands that measure, on the trained model that comes with the tests."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from hf_specdec.cli import build_app

from .eagle import GOLDENS
from .goldens import TINY_TARGET


HEAD = GOLDENS / "safeailab_eagle3"


def invoke(command: str, *arguments: Any) -> Result:
    """What `hf-specdec command …` prints, and its status."""
    words = [command, *map(str, arguments)]
    return CliRunner().invoke(build_app(), words, env={"COLUMNS": "300"})


def on_tiny_target(command: str, *arguments: Any) -> Result:
    """The same with the tests' target and a head of it, on the CPU."""
    return invoke(command, TINY_TARGET, "--draft", HEAD, "--device", "cpu", *arguments)


def last_line(result: Result) -> dict[str, Any]:
    """The JSON that ends the output."""
    return json.loads(result.stdout.splitlines()[-1])
