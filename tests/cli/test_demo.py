"""`hf-specdec demo`, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.benchmarking import HEAD
from support.goldens import TINY_TARGET
from typer.testing import CliRunner

from hf_specdec.cli import build_app


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of `hf-specdec …`; line breaks of boxes removed."""
    result = CliRunner().invoke(build_app(), list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_both_texts_are_printed_and_identical() -> None:
    code, output = run("demo", "--max-new-tokens", "24", "--device", "cpu")
    assert code == 0
    assert "identical: yes" in output
    assert "tokens per second" in output
    assert "mean acceptance length" in output


@pytest.mark.parametrize(
    "draft, tree",
    [
        (HEAD, "default"),
        (TINY_TARGET.parent / "specforge_eagle3", "[(0,), (1,), (0, 0)]"),
        (TINY_TARGET.parent / "medusa", "default"),
        (TINY_TARGET, "chain:3"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_heads_of_any_format_and_models_draft(draft: Path, tree: str) -> None:
    words = ("--draft", str(draft), "--tree", tree, "--prompt", "t1 t221 t106 t371", "--max-new-tokens", "24")
    code, output = run("demo", "--target", str(TINY_TARGET), "--device", "cpu", *words)
    assert code == 0, output
    assert "identical: yes" in output
    (accepted,) = re.findall(r"mean acceptance length +1.00 +(\S+)", output)
    assert float(accepted) > 1.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--tree", "[(0, 0)]"), "parent"),
        (("--tree", "bush:3"), "is no tree"),
        (("--dtype", "int3"), "int3"),
        (("--device", "gpu"), "'gpu' is no device"),
        (("--draft", "no/such/head"), "no/such/head"),
        (("--draft", str(HEAD)), "vocabulary of 512 tokens"),  # of another model than SmolLM2
        (("--target", "no/such/folder/here"), "no/such/folder/here"),
    ],
)
def test_bad_options_are_explained(arguments: tuple[str, ...], message: str) -> None:
    code, output = run("demo", *arguments)
    assert code == 2
    assert message in output
