"""Captures that no step needs."""

from __future__ import annotations

from hf_specdec.trees.capture_budget import CaptureBudget


def test_what_will_be_lost_pays() -> None:
    """In as much decoding as so far, and in the horizon at least."""
    budget = CaptureBudget(cost=2.0, share=0.0)
    budget.time = 100.0
    assert not budget.allows()
    assert not budget.allows(1.9, time=30.0) and budget.allows(2.1, time=30.0)
    assert not budget.allows(0.1, time=1.0) and budget.allows(0.3, time=1.0)


def test_captures_that_pay_wait_for_as_much_decoding() -> None:
    budget = CaptureBudget(cost=2.0, share=0.0)
    for number in (1, 2, 3):
        budget.time = 2.0 * number - 0.1
        assert not budget.allows(1.0, time=1.0)
        budget.time += 0.2
        assert budget.allows(1.0, time=1.0)
        budget.charge(1.0, time=1.0)


def test_a_share_of_the_time_is_free() -> None:
    budget = CaptureBudget(cost=2.0)
    budget.time = 2.0 / budget.share
    assert budget.allows()
    budget.charge()
    assert not budget.allows()
    budget.time *= 2
    assert budget.allows()


def test_nothing_waits_where_graphs_are_captured_ahead() -> None:
    budget = CaptureBudget(cost=2.0)
    budget.is_closed, budget.time = True, 1e9
    assert not budget.allows(1e9, time=1.0)
