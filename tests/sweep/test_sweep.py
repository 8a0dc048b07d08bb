"""Every class of transformers' registry that writes text: exact, or refused by name before a forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from .registry import Pair, all_pairs
from .running import run
from .table import summaries_in


LEAST_EXACT = 200
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


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("pair", all_pairs(), ids=str)
def test_pair(pair: Pair, documented: dict[Pair, str]) -> None:
    result = run(pair)
    assert not result.failures, result.line()
    said = documented.get(pair)
    if f"transformers {transformers.__version__}:" in PAGE.read_text():
        assert result.summary == said, f"docs/compatibility.md says {said!r}: {result.line()}"
    elif said in ("exact", "partly"):
        assert result.summary in ("exact", "partly"), f"docs/compatibility.md says {said!r}: {result.line()}"
