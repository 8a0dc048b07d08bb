"""Which dtype a CPU runs fastest."""

from __future__ import annotations

import pytest
import typer
from support.goldens import TINY_TARGET

from hf_specdec.benchmarking import dtypes
from hf_specdec.benchmarking.dtypes import ForwardTimes, describe, fastest
from hf_specdec.cli.arguments import checked_dtype


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
    times = dtypes.measure(str(TINY_TARGET))
    assert {one.dtype for one in times} == set(dtypes.MEASURED)
    assert all(0 < one.one < 1 and 0 < one.several < 1 for one in times)


def test_auto_is_measured_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = [ForwardTimes(dtype=name, one=one, several=1.0) for name, one in (("bfloat16", 0.2), ("float32", 0.3))]
    monkeypatch.setattr(dtypes, "measure", lambda target: times)
    assert checked_dtype("auto", "cpu", "TARGET", "a target") == "bfloat16"
    assert capsys.readouterr().err == f"{describe(times)}\n"
    assert checked_dtype(None, "cpu", "TARGET", "a target") == "float32"
    assert checked_dtype("auto", "cuda:0", "TARGET", "a target") == "bfloat16"
    assert capsys.readouterr().err == ""
    with pytest.raises(typer.BadParameter, match="'auto' is not one of float32, bfloat16, float16\\."):
        checked_dtype("auto", "cpu")  # where a later run has to take the same
    with pytest.raises(typer.BadParameter, match="float16, auto\\."):
        checked_dtype("int3", "cpu", "TARGET")
