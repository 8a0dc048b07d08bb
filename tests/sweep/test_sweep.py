"""Every class of transformers' registry that writes text: exact, or refused by name before a forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from hf_specdec.models.reasons import Reason

from .registry import Pair, all_pairs
from .running import run
from .table import rows_in, summaries_in


LEAST_EXACT, LEAST_SHARE = 230, 0.9
SAMPLE = ("opt", "gpt_neo", "cpmant")
"""Architectures whose first pairs run with every `make test`."""
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.fixture(scope="module")
def documented() -> dict[Pair, str]:
    """What docs/compatibility.md says of every pair."""
    return summaries_in(PAGE)


@pytest.mark.any_version
def test_the_table(documented: dict[Pair, str]) -> None:
    summaries = list(documented.values())
    assert "failure" not in summaries
    assert summaries.count("exact") >= LEAST_EXACT
    run = len(summaries) - summaries.count("not run")
    assert summaries.count("exact") + summaries.count("partly") >= LEAST_SHARE * run


@pytest.mark.any_version
def test_reasons() -> None:
    """Each refusal in the table is for one of ten."""
    assert len(Reason) <= 10
    said = {row.reason for row in rows_in(PAGE) if row.summary in ("partly", "refused")}
    assert None not in map(Reason.of, said)


@pytest.mark.parametrize("model_type", SAMPLE)
@pytest.mark.some_cases(1)
def test_sample(model_type: str, documented: dict[Pair, str]) -> None:
    check(next(pair for pair in all_pairs() if pair.model_type == model_type), documented)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("pair", all_pairs(), ids=str)
def test_pair(pair: Pair, documented: dict[Pair, str]) -> None:
    check(pair, documented)


def check(pair: Pair, documented: dict[Pair, str]) -> None:
    """No failure, a reason for each refusal, and the summary of the page."""
    result = run(pair)
    assert not result.failures, result.line()
    refused = [outcome.detail for outcome in result.outcomes.values() if outcome.kind == "refused"]
    assert None not in map(Reason.of, refused), f"without a reason: {result.line()}"
    said = documented.get(pair)
    if f"transformers {transformers.__version__}:" in PAGE.read_text():
        assert result.summary == said, f"docs/compatibility.md says {said!r}: {result.line()}"
    elif said in ("exact", "partly"):
        assert result.summary in ("exact", "partly"), f"docs/compatibility.md says {said!r}: {result.line()}"
