"""`hf-specdec demo`, as a user runs it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.benchmarking import HEAD
from support.goldens import TINY_TARGET
from typer.testing import CliRunner

from hf_specdec import loading
from hf_specdec.benchmarking import dtypes, environment
from hf_specdec.benchmarking.dtypes import ForwardTimes
from hf_specdec.cli import build_app
from hf_specdec.cli import demo as cli_demo
from hf_specdec.loading import load_target


TINY = ("--target", str(TINY_TARGET), "--device", "cpu", "--prompt", "t1 t221 t106 t371", "--rounds", "1")
SECONDS = {"float32": 0.004, "bfloat16": 0.002}


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of `hf-specdec …`; line breaks of boxes removed."""
    result = CliRunner().invoke(build_app(), list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.slow
def test_both_texts_are_printed_and_identical() -> None:
    words = ("--dtype", "float32", "--max-new-tokens", "16", "--rounds", "2", "--device", "cpu")
    code, output = run("demo", *words)
    assert code == 0
    assert "identical: yes" in output
    assert "turn 1: plain" in output and "turn 2: plain" in output
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
@pytest.mark.some_cases(2)
def test_heads_of_any_format_and_models_draft(draft: Path, tree: str) -> None:
    words = ("--draft", str(draft), "--tree", tree, "--dtype", "float32", "--max-new-tokens", "24")
    code, output = run("demo", *TINY, *words)
    assert code == 0, output
    assert "identical: yes" in output
    (accepted,) = re.findall(r"mean acceptance length +1.00 +(\S+)", output)
    assert float(accepted) > 1.0


@pytest.mark.parametrize("dtype, has", [(None, True), ("auto", True), ("bfloat16", False)])
@pytest.mark.some_cases(2)
def test_the_dtype_of_a_cpu_is_measured_unless_it_is_given(
    dtype: str | None, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What half precision takes here is told, not measured."""
    monkeypatch.setattr(
        dtypes, "times_of", lambda model, name: ForwardTimes(dtype=name, one=SECONDS[name], several=0.009)
    )
    made: list[torch.dtype] = []
    monkeypatch.setattr(
        loading, "load_target", lambda name, dtype, device: made.append(dtype) or load_target(name, dtype, device)
    )
    words = () if dtype is None else ("--dtype", dtype)
    code, output = run("demo", *TINY, *words, "--max-new-tokens", "8")
    assert code == 0, output
    assert made == [*([torch.bfloat16, torch.float32] if has else []), torch.bfloat16]
    assert ("forwards of 1 and 10 tokens take 2 and 9 ms in bfloat16, 4 and 9 ms in float32." in output) == has
    assert (f"{environment.cpu()}, " in output) == has and ("Taken: bfloat16." in output) == has


@pytest.mark.slow
def test_fewer_tokens_where_calls_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, tokens in ((1.2, 120), (0.001, cli_demo.MOST_TOKENS), (60, cli_demo.FEWEST_TOKENS)):
        assert cli_demo._affordable(cli_demo.Run(tokens=torch.zeros(12), seconds=seconds)) == tokens
    timed = cli_demo._generate
    monkeypatch.setattr(cli_demo, "_generate", lambda *args, **options: replace(timed(*args, **options), seconds=60))
    code, output = run("demo", *TINY, "--dtype", "float32")
    assert code == 0, output
    assert re.search(rf"tokens +{cli_demo.FEWEST_TOKENS} +{cli_demo.FEWEST_TOKENS}\b", output), output


def run_with_clock(
    monkeypatch: pytest.MonkeyPatch, plain: list[float], sped_up: list[float]
) -> tuple[str, list[bool]]:
    """
    The output for calls that seem to have taken these seconds, and whether each call, warm-ups aside, was one with
    drafts.
    """
    left, order, timed = {False: iter(plain), True: iter(sped_up)}, [], cli_demo._generate

    def generate(*arguments: Any, **options: Any) -> Any:
        done, drafts = timed(*arguments, **options), "assistant_model" in options
        if options["max_new_tokens"] == cli_demo.WARM_UP_TOKENS:
            return done
        order.append(drafts)
        return replace(done, seconds=next(left[drafts]))

    monkeypatch.setattr(cli_demo, "_generate", generate)
    words = ("--dtype", "float32", "--max-new-tokens", "20", "--rounds", str(len(plain)))
    code, output = run("demo", *TINY, *words)
    assert code == 0 and "identical: yes" in output, output
    return output, order


def test_both_ways_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow call does not decide: medians, and their spread."""
    output, order = run_with_clock(monkeypatch, [1.0, 10.0, 1.25], [0.5, 0.4, 5.0])
    assert order == [False, True] * 3
    assert re.search(r"seconds +1.25 +0.50", output), output
    assert re.search(r"tokens per second +16.0 \(2.0 to 20.0\) +40.0 \(4.0 to 50.0\)", output), output
    assert re.search(r"speed-up +1.00 +2.00 \(0.25 to 25.00\)", output), output


@pytest.mark.parametrize(
    "plain, sped_up, says",
    [([1.0, 1.25, 2.0], [0.5, 0.8, 1.0], True), ([1.0, 1.02, 1.04], [0.5, 0.51, 0.52], False), ([1.0], [0.9], False)],
)
@pytest.mark.some_cases(1)
def test_a_spread_larger_than_the_difference_is_said(
    plain: list[float], sped_up: list[float], says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, _ = run_with_clock(monkeypatch, plain, sped_up)
    assert ("is larger than the difference" in output) == says, output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--rounds", "0"), "--rounds"),
        (("--tree", "[(0, 0)]"), "parent"),
        (("--tree", "bush:3"), "is no tree"),
        (("--dtype", "int3"), "int3"),
        (("--device", "gpu"), "'gpu' is no device"),
        (("--draft", "no/such/head"), "no/such/head"),
        (("--dtype", "float32", "--draft", str(HEAD)), "vocabulary of 512 tokens"),  # of another model than SmolLM2
        (("--target", "no/such/folder/here"), "no/such/folder/here"),
    ],
)
def test_bad_options_are_explained(arguments: tuple[str, ...], message: str) -> None:
    code, output = run("demo", *arguments)
    assert code == 2
    assert message in output
