"""The metrics of all replicas on one page, each with a label that tells whose they are."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


SECONDS_BETWEEN_NOTES = 2.0
"""Seconds between two notes of a replica."""
SECONDS_TO_FORGET = 15.0
"""Seconds without a note after which a replica is no more."""


class Board:
    """
    Keeps the last metrics of every replica.

    Args:
        clock (`Callable`, *optional*): tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._notes: dict[str, tuple[float, str]] = {}

    def note(self, replica: str, page: str) -> None:
        """Takes the metrics of a replica, as its own `/metrics` has them."""
        self._notes[replica] = (self._clock(), page)

    def page(self) -> str:
        """The metrics of all replicas that have lately noted theirs."""
        latest = self._clock() - SECONDS_TO_FORGET
        self._notes = {replica: note for replica, note in self._notes.items() if note[0] >= latest}
        registry = CollectorRegistry()
        registry.register(_Noted({replica: page for replica, (_, page) in self._notes.items()}))
        return generate_latest(registry).decode()


class _Noted(Collector):
    def __init__(self, pages: dict[str, str]):
        self._pages = pages

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                own = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    own.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        return list(families.values())
