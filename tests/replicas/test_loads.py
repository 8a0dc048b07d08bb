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
    """None has arrived before the last one is chosen for; texts that begin alike may lead to one by eight."""
    table, requests = PrefixTable[str](), [Request() for _ in range(24)]
    for request in requests:
        loads.choose(request, table.ranked([], loads.of("ab"))[0])
    assert loads.of("ab") == {"a": 12, "b": 12}
    for number, request in enumerate(requests):
        loads.route(request, "ab"[number % 2])
    assert loads.of("ab") == {"a": 12, "b": 12}
    for _ in range(12):
        loads.complete("a")
    del requests, request
    gc.collect()
    assert loads.of("ab") == {"a": 0, "b": 12}


def test_requests_that_go_elsewhere_or_nowhere(loads: Loads) -> None:
    request, given_up = Request(), Request()
    loads.choose(request, "a")
    loads.choose(given_up, "a")
    loads.choose(request, "b")
    assert loads.of("ab") == {"a": 1, "b": 1}
    loads.route(request, "a")  # a replica by its rank was full
    assert loads.of("ab") == {"a": 2, "b": 0}
    del given_up
    gc.collect()
    assert loads.of("ab") == {"a": 1, "b": 0}


def test_replicas_that_are_no_more(loads: Loads) -> None:
    request = Request()
    loads.choose(request, "a")
    loads.forget("a")
    loads.route(request, "b")
    assert loads.of("ab") == {"a": 0, "b": 1}
