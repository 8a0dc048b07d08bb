"""`hf-specdec demo`, as a user runs it."""

from __future__ import annotations

import pytest
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
    "arguments, message",
    [
        (("--tree", "[(0, 0)]"), "parent"),
        (("--dtype", "int3"), "int3"),
        (("--target", "no/such/folder/here"), "no/such/folder/here"),
    ],
)
def test_bad_options_are_explained(arguments: tuple[str, ...], message: str) -> None:
    code, output = run("demo", *arguments)
    assert code == 2
    assert message in output
