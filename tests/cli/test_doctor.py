"""`hf-specdec doctor`, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle import GOLDENS
from support.goldens import TINY_TARGET, trained_prompts, trained_tokenizer
from typer.testing import CliRunner

from hf_specdec import BlockHead, EagleHead, loading
from hf_specdec.cli import build_app


HEAD = GOLDENS / "speculators_eagle3"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    texts = [trained_tokenizer().decode(ids) for ids in trained_prompts()["prompts"][:2]]
    path.write_text("\n\n".join(texts))
    return path


def doctor(*arguments: Any) -> tuple[int, str]:
    """Exit code and output of `hf-specdec doctor …`."""
    words = ["doctor", *map(str, arguments), "--max-new-tokens", "32"]
    result = CliRunner().invoke(build_app(), words, env={"COLUMNS": "400"})
    return result.exit_code, result.output


def test_a_good_head(prompts: Path) -> None:
    code, text = doctor(TINY_TARGET, HEAD, "--text", prompts)
    assert code == 0, text
    assert "verdict: The head fits" in text and "top-1" in text


def test_figures_fit_into_eighty_columns(prompts: Path) -> None:
    """As on a usual terminal, and where the output is a file."""
    words = ["doctor", str(TINY_TARGET), str(HEAD), "--text", str(prompts), "--max-new-tokens", "8"]
    result = CliRunner().invoke(build_app(), words, env={"COLUMNS": "80"})
    row = next(line for line in result.stdout.splitlines() if "as read ←" in line)
    assert len(re.findall(r"-?\d*\.\d\d", row)) == 5 + 2  # depths, a chain's tokens, log-probability


def test_what_is_said_on_the_way(prompts: Path) -> None:
    """Where the output is no terminal: a line per answer and per reading on stderr, the report alone on stdout."""
    words = ["doctor", str(TINY_TARGET), str(HEAD), "--text", str(prompts), "--max-new-tokens", "12"]
    result = CliRunner().invoke(build_app(), words, env={"COLUMNS": "400"})
    lines = result.stderr.splitlines()
    assert "The target answers prompt 2 of 2." in lines
    assert sum(line.startswith("Reading ") for line in lines) > 4
    assert "Reading " not in result.stdout and "verdict: " in result.stdout


@pytest.mark.slow
def test_the_default_target(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "smollm2_folder", lambda: TINY_TARGET)
    code, text = doctor(HEAD, "--text", prompts)
    assert code == 0 and "verdict: The head fits" in text
    code, text = doctor(TINY_TARGET, HEAD, "another")
    assert code == 2 and "give a target and a head, not 3 names" in text


def test_a_misread_head(prompts: Path, tmp_path: Path) -> None:
    EagleHead.from_pretrained(HEAD, norm_before_residual=False).save_pretrained(tmp_path / "head")
    code, text = doctor(TINY_TARGET, tmp_path / "head", "--text", prompts)
    assert code == 1
    assert "verdict: The head is misread" in text and "norm_before_residual=True" in text


@pytest.mark.slow
def test_block_heads(prompts: Path, tmp_path: Path) -> None:
    code, text = doctor(TINY_TARGET, GOLDENS / "dflash", "--text", prompts)
    assert code == 0, text
    assert "zlab_dflash, dflash" in text and "read anchor_first: False: row 1 predicts" in text and "log-prob" in text
    BlockHead.from_pretrained(GOLDENS / "dflash", anchor_first=True).save_pretrained(tmp_path / "head")
    code, text = doctor(TINY_TARGET, tmp_path / "head", "--text", prompts)
    assert code == 1 and f"`BlockHead.from_pretrained('{tmp_path / 'head'}', anchor_first=False)`" in text


@pytest.mark.slow
def test_placement_and_dtype(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's dtype unless another is asked for; `--device-map` goes to transformers."""
    calls = []

    def load(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return original(*arguments, **options)

    original = EagleHead.from_pretrained
    monkeypatch.setattr(EagleHead, "from_pretrained", load)
    code, text = doctor(TINY_TARGET, HEAD, "--text", prompts, "--device-map", "auto")
    assert code == 0, text
    doctor(TINY_TARGET, HEAD, "--text", prompts, "--dtype", "bfloat16", "--device", "cpu")
    assert [call["dtype"] for call in calls] == [torch.float32, torch.bfloat16]


def test_without_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    for content, message in (("\n  \n", "holds no prompts"), (None, "No such file")):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        code, text = doctor(TINY_TARGET, HEAD, "--text", path)
        assert code == 2
        assert "--text" in text and message in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--dtype", "int8"), "'int8' is not one of auto, float32"),
        (("--device", "cpu", "--device-map", "auto"), "not both"),
        (("--device", "foo"), "'foo' is no device"),
    ],
)
def test_impossible_options(arguments: tuple[str, ...], message: str) -> None:
    code, text = doctor(TINY_TARGET, HEAD, *arguments)
    assert code == 2 and message in text


def test_without_a_target() -> None:
    code, text = doctor("/no/such/folder", HEAD)
    assert code == 2 and "TARGET" in text and "There is no folder '/no/such/folder'" in text


def test_without_a_head(tmp_path: Path) -> None:
    code, text = doctor(TINY_TARGET, tmp_path)
    assert code == 2
    assert "config.json" in text
