"""When requests speculate: by load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """
    Switches speculation off while many requests run: then a step is bound by arithmetic, and every draft node costs
    its share of it.

    Args:
        disable_by_batch_size (`int`, *optional*): with more requests than this, steps carry no draft nodes.
        counts_waiting (`bool`): whether requests that wait for their turn count, too: they will run as soon as others
            end, so that the switch comes before the load does.
    """

    disable_by_batch_size: int | None = None
    counts_waiting: bool = False

    def speculates(self, num_running: int, num_waiting: int) -> bool:
        """Whether a step with so many requests carries draft nodes."""
        if self.disable_by_batch_size is None:
            return True
        return num_running + (num_waiting if self.counts_waiting else 0) <= self.disable_by_batch_size
