"""Which cases run every time: Triton's interpreter takes a second and more for most."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """The cases as parameters (tuples as several), those that are not chosen marked `slow`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.slow)
        for case in cases
    ]
