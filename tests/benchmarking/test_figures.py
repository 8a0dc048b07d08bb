"""Figures, against values reckoned by hand."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hf_specdec import SpeculationMetrics
from hf_specdec.benchmarking.comparison import Call
from hf_specdec.benchmarking.figures import figures, milliseconds_of_step, percentiles
from hf_specdec.benchmarking.tables import show, suite_table, table


def metrics(accepted: list[int], seconds: dict[str, float] | None = None) -> SpeculationMetrics:
    found = SpeculationMetrics(accepted_per_step=[accepted], seconds=seconds or {})
    for count in accepted:
        found.add_draft(4, count)
    return found


def call(contender: str, task: str, tokens: list[int], seconds: float, prompt: int = 0, **others: object) -> Call:
    return Call(contender=contender, task=task, prompt=prompt, round=0, tokens=tokens, seconds=seconds, **others)


def test_steps_that_ran_as_a_whole() -> None:
    assert milliseconds_of_step([metrics([2, 0], {"prefill": 3.0, "steps": 0.5})]) == {"whole": 250.0}


CALLS = [
    call("generate", "chat", [1, 2, 3, 4], 2.0),
    call("tree", "chat", [1, 2, 3, 4], 1.0, metrics=metrics([2, 0])),
    call("generate", "code", [5, 6, 7, 8, 9, 9], 2.0, prompt=1),
    call("tree", "code", [5, 6, 7, 8, 9, 0], 0.5, prompt=1, metrics=metrics([3, 1])),
]


def test_speed_up_is_total_tokens_over_total_seconds() -> None:
    found = {(f.task, f.contender): f for f in figures(CALLS, temperature=0.0, reference="generate")}
    assert list(found) == [(task, name) for task in ("chat", "code", "all") for name in ("generate", "tree")]
    assert found["chat", "tree"].speed_up == pytest.approx(2.0)
    assert found["code", "tree"].speed_up == pytest.approx(4.0)
    overall = found["all", "tree"]
    assert overall.tokens_per_second == pytest.approx(10 / 1.5)
    assert overall.speed_up == pytest.approx((10 / 1.5) / (10 / 4.0))  # 2.67: not the mean of 2 and 4
    assert overall.to_dict()["tokens_per_second"] == overall.tokens_per_second
    assert (overall.p20, overall.p50, overall.p80) == pytest.approx((5.6, 8.0, 10.4))  # calls of 4 and 12 a second
    assert found["all", "generate"].speed_up == 1.0


def test_acceptance_is_pooled_over_drafts() -> None:
    overall = figures(CALLS, temperature=0.0, reference="generate")[-1]
    assert overall.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert overall.acceptance_per_position == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert figures(CALLS, temperature=0.0, reference="generate")[-2].mean_acceptance_length is None


def test_texts_are_compared_in_greedy_calls_alone() -> None:
    found = {(f.task, f.contender): f for f in figures(CALLS, temperature=0.0, reference="generate")}
    assert (found["chat", "tree"].identical, found["chat", "tree"].texts) == (1, 1)
    assert (found["code", "tree"].identical, found["code", "tree"].texts) == (0, 1)
    assert (found["all", "tree"].identical, found["all", "tree"].texts) == (1, 2)
    assert {f.identical for f in figures(CALLS, temperature=0.5, reference="generate")} == {None}


def test_a_single_task_has_no_total() -> None:
    assert [f.task for f in figures(CALLS[:2], temperature=0.0, reference="generate")] == ["chat", "chat"]


def test_percentiles() -> None:
    assert percentiles([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}
    assert percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx({"p20": 2.0, "p50": 3.5, "p80": 5.0})


def test_where_the_time_of_a_step_goes() -> None:
    """The prefill is no part of a step."""
    first = metrics([1, 2], {"prefill": 9.0, "propose": 0.1, "score": 0.2, "accept": 0.01, "commit": 0.03})
    second = metrics([0, 0], {"prefill": 9.0, "propose": 0.3, "score": 0.2, "accept": 0.04})
    assert milliseconds_of_step([first, second]) == pytest.approx({"draft": 100.0, "verify": 100.0, "rest": 20.0})


def test_pooling_leaves_the_calls_as_they_were() -> None:
    first, second = metrics([1]), metrics([3])
    assert SpeculationMetrics.sum_of([first, second]).num_accepted_per_position == [2, 1, 1]
    assert first.num_accepted_per_position == [1] and first.accepted_per_step == [[1]]


@pytest.mark.parametrize(
    ("is_terminal", "width", "shows_percentiles"), [(True, 120, True), (True, 72, False), (False, 72, True)]
)
def test_tables_are_not_cut_off(is_terminal: bool, width: int, shows_percentiles: bool) -> None:
    """A terminal gets what fits, a file all of it."""
    rows = figures(CALLS, temperature=0.0, reference="generate")
    report: Any = SimpleNamespace(figures=rows, differences=[])
    console = Console(file=StringIO(), force_terminal=is_terminal, color_system=None, width=width)
    show(console, table(report), table(report, is_brief=True))
    show(console, suite_table(report))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("p20 – p80" in printed) == shows_percentiles and console.width == width
    text = printed.replace("1, 2, …", "")
    assert "…" not in text and "4.00×" in text and text.count("mean accepted tokens") == 1
