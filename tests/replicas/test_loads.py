"""Open requests of replicas, from when a replica is chosen for one."""

from __future__ import annotations

import gc

import pytest

from hf_specdec.replicas.loads import Loads
from hf_specdec.replicas.prefixes import PrefixTable


class Request:
    """What Ray Serve hands to a router: cannot be hashed, as its own."""

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def loads() -> Loads:
    return Loads()


def test_requests_that_come_at_once_are_shared_out(loads: Loads) -> None:
    """None has arrived before the last one is chosen for."""
    table, requests = PrefixTable[str](), {str(number): Request() for number in range(24)}
    for key, request in requests.items():
        loads.choose(key, request, table.ranked([], loads.of("ab"))[0])
    assert loads.of("ab") == {"a": 12, "b": 12}
    for key in requests:
        loads.route(key, "ab"[int(key) % 2])
    del requests, request
    gc.collect()
    assert loads.of("ab") == {"a": 12, "b": 12}
    for number in range(24):
        loads.complete(str(number), "ab"[number % 2])
    assert loads.of("ab") == {"a": 0, "b": 0}


def test_requests_that_go_elsewhere_or_nowhere(loads: Loads) -> None:
    request, given_up = Request(), Request()
    loads.choose("1", request, "a")
    loads.choose("2", given_up, "a")
    loads.choose("1", request, "b")
    assert loads.of("ab") == {"a": 1, "b": 1}
    loads.route("1", "a")  # a replica by its rank was full
    assert loads.of("ab") == {"a": 2, "b": 0}
    del given_up
    gc.collect()
    assert loads.of("ab") == {"a": 1, "b": 0}


def test_requests_that_a_full_replica_refuses(loads: Loads) -> None:
    """Ray Serve says that they have ended there, though they have never arrived."""
    request = Request()
    loads.choose("1", request, "a")
    loads.complete("1", "a")
    loads.choose("1", request, "b")
    loads.route("1", "b")
    assert loads.of("ab") == {"a": 0, "b": 1}
    loads.complete("1", "b")
    assert loads.of("ab") == {"a": 0, "b": 0}


def test_requests_that_end_before_they_are_said_to_arrive(loads: Loads) -> None:
    request = Request()
    loads.choose("1", request, "a")
    loads.complete("1", "a")
    loads.route("1", "a")
    assert loads.of("a") == {"a": 0} and not loads._ended and not loads._at


def test_replicas_that_are_no_more(loads: Loads) -> None:
    waiting, open_one = Request(), Request()
    loads.choose("1", waiting, "a")
    loads.choose("2", open_one, "a")
    loads.route("2", "a")
    loads.forget("a")
    loads.complete("2", "a")
    loads.route("1", "b")
    assert loads.of("ab") == {"a": 0, "b": 1}
