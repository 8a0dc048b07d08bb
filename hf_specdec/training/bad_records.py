"""Records that cannot be trained on: skipped and counted, or the end of the run."""

from __future__ import annotations

from collections.abc import Callable

from transformers.utils import logging


logger = logging.get_logger(__name__)

_MOST_WARNINGS = 10


class BadRecord(ValueError):
    """A record that is damaged or of no known shape; the message names its place and the reason."""


class BadRecords:
    """
    Skips bad records with a warning for each of the first ten, and counts all.

    Args:
        strict (`bool`, *optional*, defaults to `False`): raise instead of skipping.
        warn (callable, *optional*): receives each warning. Defaults to the log; processes after the first pass one
            that does nothing.
    """

    def __init__(self, strict: bool = False, warn: Callable[[str], None] = logger.warning):
        self.strict, self.warn, self.count = strict, warn, 0

    def skip(self, error: BadRecord) -> None:
        """
        Counts a record that is left out.

        Raises:
            BadRecord: the error itself, if `strict`.
        """
        if self.strict:
            raise error
        self.count += 1
        if self.count <= _MOST_WARNINGS:
            last = " More are counted, not shown." if self.count == _MOST_WARNINGS else ""
            self.warn(f"Skipped a record. {error}{last}")

    def finish(self, source: str) -> None:
        """Warns how many records of `source` were left out, if any were."""
        if self.count:
            records = "record was" if self.count == 1 else "records were"
            self.warn(f"{source}: {self.count} {records} skipped. `strict_data` (--strict-data) stops at the first.")
