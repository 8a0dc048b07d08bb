"""Which dtype a CPU runs fastest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import typer
from support.benchmarking import invoke
from support.goldens import TINY_TARGET

from hf_specdec import SpeculativeConfig, loading
from hf_specdec.benchmarking import dtypes
from hf_specdec.benchmarking.dtypes import ForwardTimes, describe, fastest
from hf_specdec.cli.arguments import checked_dtype, load_in
from hf_specdec.serving.engine.options import EngineOptions
from hf_specdec.serving.engine.process import load


@pytest.mark.parametrize(
    "float32, bfloat16, takes",
    [
        ((120, 220), (165, 330), "float32"),  # AVX-512 without its bfloat16
        ((58, 112), (42, 191), "float32"),  # AVX2: a step with a tree makes up for what one token takes longer
        ((43, 80), (30, 42), "bfloat16"),  # AMX
        ((40, 100), (38, 95), "float32"),  # nearly as fast, and exact
    ],
)
def test_the_faster_one_is_taken(float32: tuple[int, int], bfloat16: tuple[int, int], takes: str) -> None:
    times = [
        ForwardTimes(dtype=name, one=one / 1e3, several=several / 1e3)
        for name, (one, several) in (("bfloat16", bfloat16), ("float32", float32))
    ]
    assert fastest(times) == takes
    assert f"{float32[0]} and {float32[1]} ms in float32. Taken: {takes}." in describe(times)


def test_forwards_are_timed_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "SECONDS", 0.0)
    model, times = dtypes.measure(lambda dtype: loading.load_target(str(TINY_TARGET), dtype, "cpu"))
    assert tuple(one.dtype for one in times) == dtypes.MEASURED and model.dtype == torch.float32
    assert all(0 < one.one < 1 and 0 < one.several < 1 for one in times)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes in which targets are loaded."""
    found: list[torch.dtype] = []
    load_target = loading.load_target

    def noted(name: str | None, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
        found.append(dtype)
        return load_target(name, dtype, *args, **options)

    monkeypatch.setattr(loading, "load_target", noted)
    monkeypatch.setattr(dtypes, "SECONDS", 0.0)
    return found


@pytest.mark.parametrize("name", dtypes.MEASURED)
def test_what_has_been_loaded_is_used(
    name: str, loads: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the server, `tune`, and `bench` with its texts in float32; a further load is for another dtype."""
    monkeypatch.setattr(dtypes, "fastest", lambda times: name)
    expected = [torch.bfloat16, torch.float32, *([torch.bfloat16] if name == "bfloat16" else [])]

    model, dtype = load_in("auto", "cpu", str(TINY_TARGET), "TARGET")
    assert (model.dtype, dtype, loads) == (loading.DTYPES[name], name, expected)
    assert f"Taken: {name}." in capsys.readouterr().err

    loads.clear()
    started = EngineOptions(str(TINY_TARGET), "ngram", SpeculativeConfig(), "cpu", "auto", num_blocks=16)
    told: list[str] = []
    manager, _ = load(started, told.append)
    assert manager.engine.target.model.dtype == loading.DTYPES[name] and loads == expected
    assert any(f"Taken: {name}." in line for line in told)

    loads.clear()
    gate = "--gate" if name == "float32" else "--no-gate"
    options = ["--draft", "ngram", "--dtype", "auto", "--device", "cpu", "--tree", "chain:2", "--rounds", 1, gate]
    result = invoke("bench", TINY_TARGET, *options, "--task", "chat", "--num-prompts", 1, "--max-new-tokens", 4)
    assert result.exit_code == 0, result.output
    assert loads == expected and f'"dtype": "{name}"' in result.output


def test_auto_is_for_a_cpu_alone() -> None:
    assert checked_dtype("auto", "cpu", may_be_auto=True) == "auto"
    assert checked_dtype(None, "cpu", may_be_auto=True) == "float32"
    assert checked_dtype("auto", "cuda:0", may_be_auto=True) == "bfloat16"
    with pytest.raises(typer.BadParameter, match="'auto' is not one of float32, bfloat16, float16\\."):
        checked_dtype("auto", "cpu")  # where a later run has to take the same
    with pytest.raises(typer.BadParameter, match="float16, auto\\."):
        checked_dtype("int3", "cpu", may_be_auto=True)
