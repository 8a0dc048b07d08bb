"""Which cases of a test `make test` runs."""

from __future__ import annotations

from itertools import product

import pytest
from support.cases import chosen


GRID = [list(values) for values in product("abcd", "xyz", "01")]


def test_every_value_comes_once() -> None:
    kept = [GRID[place] for place in chosen(GRID, None)]
    assert [{case[place] for case in kept} for place in range(3)] == [set("abcd"), set("xyz"), set("01")]
    assert len(kept) == 4
    assert chosen(GRID, None) == chosen(GRID, None)


@pytest.mark.parametrize("most", [1, 2, 4, 9, 24, 99])
def test_so_many(most: int) -> None:
    kept = chosen(GRID, most)
    assert len(kept) == min(most, len(GRID)) and kept <= set(range(len(GRID)))
    assert most < 4 or len({GRID[place][0] for place in kept}) == 4


def test_cases_that_differ_in_nothing_else() -> None:
    assert chosen([["a"], ["b"], ["c"]], None) == {0, 1, 2}
    assert chosen([], None) == chosen([], 3) == set()
