"""Which cases of a test `make test` runs, where their values are all worth a test and their combinations are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def mark_the_rest_slow(items: Sequence[pytest.Item]) -> None:
    """
    Marks cases of tests that have the marker `some_cases` as `slow`: those without which every value of every
    parameter still comes once, or with a number, all but so many, which are spread over the test's values.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("some_cases") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        cases.sort(key=lambda case: list(case.callspec.indices.values()))  # others may have shuffled them
        marker = cases[0].get_closest_marker("some_cases")
        most = marker.args[0] if marker is not None and marker.args else None
        fast = [case for case in cases if case.get_closest_marker("slow") is None]
        kept = chosen([values_of(case) for case in fast], most)
        for place, case in enumerate(fast):
            if place not in kept:
                case.add_marker(pytest.mark.slow)


def values_of(case: pytest.Function) -> list[str]:
    """The values of a case's parameters, as its name tells them."""
    return list(case.callspec._idlist)


def chosen(cases: list[list[str]], most: int | None) -> set[int]:
    """
    Places of the cases that run: greedily, each brings as many new values as there are; at equal numbers the first.
    With `most`, so many evenly spaced ones of these, if there are more, and else further ones.
    """
    seen: set[tuple[int, str]] = set()
    kept: list[int] = []
    while True:
        news = [len({*enumerate(case)} - seen) for case in cases]
        place = max(range(len(cases)), key=lambda place: (news[place], -place), default=-1)
        if place < 0 or news[place] == 0:
            break
        kept.append(place)
        seen.update(enumerate(cases[place]))
    if most is None or len(kept) == most:
        return set(kept)
    if len(kept) < most:
        others = [place for place in range(len(cases)) if place not in kept]
        return {*kept, *_spread(others, most - len(kept))}
    return set(_spread(sorted(kept), most))


def _spread(places: list[int], most: int) -> list[int]:
    """At most so many of some places, evenly spaced, the first among them."""
    number = min(most, len(places))
    return [places[place * len(places) // number] for place in range(number)]
