"""Captures that no step needs."""

from __future__ import annotations

from hf_specdec.trees.capture_budget import CaptureBudget


def test_what_was_lost_pays() -> None:
    budget = CaptureBudget(cost=2.0)
    assert not budget.allows() and not budget.allows(1.9) and budget.allows(2.1)


def test_a_share_of_the_time_is_free() -> None:
    budget = CaptureBudget(cost=2.0)
    budget.time = 2.0 / budget.SHARE
    assert budget.allows()
    budget.charge()
    assert not budget.allows()
    budget.time *= 2
    assert budget.allows()


def test_nothing_waits_where_graphs_are_captured_ahead() -> None:
    budget = CaptureBudget(cost=2.0)
    budget.is_closed, budget.time = True, 1e9
    assert not budget.allows(1e9)
