"""The load policy, which switches speculation off while many requests run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """
    Switches speculation off while many requests run: such steps are compute-bound, so that every draft node costs
    time.

    Args:
        disable_by_batch_size (`int`, *optional*): with more requests than this, steps carry no draft nodes; None for
            speculation at any load.
        counts_waiting (`bool`): whether waiting requests count as well. They run as soon as others end, so that the
            switch comes before the load does.
    """

    disable_by_batch_size: int | None = None
    counts_waiting: bool = False

    def speculates(self, num_running: int, num_waiting: int) -> bool:
        """Whether a step carries draft nodes with so many running and waiting requests."""
        if self.disable_by_batch_size is None:
            return True
        return num_running + (num_waiting if self.counts_waiting else 0) <= self.disable_by_batch_size
