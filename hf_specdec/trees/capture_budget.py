"""What captures of CUDA graphs may cost that no step needs."""

from __future__ import annotations


class CaptureBudget:
    """
    Says whether to capture what steps could do without, as another tree of `tree="auto"`, or a graph in spare time:
    once steps have lost as much for want of it as the capture takes, or as long as such captures take a small share of
    the time. (A text may end soon, so that the past stands for what is to come. Captures and their absence together
    cost at most about twice what the best choice in hindsight would.)

    Args:
        cost (`float`): seconds of a usual capture, before any was timed.
    """

    SHARE = 0.01
    """Share of the time for captures for want of which nothing is known to be lost."""

    def __init__(self, cost: float = 0.3):
        self.cost = cost
        """Seconds that the last capture took."""
        self.time = self.spent = 0.0
        """Seconds of decoding so far, and those of captures that no step needed."""
        self.is_closed = False
        """Whether nothing may be captured between steps, since graphs are captured ahead."""

    def allows(self, lost: float = 0.0) -> bool:
        """
        Whether a capture is worth it.

        Args:
            lost (`float`): seconds that steps have lost for want of it.
        """
        if self.is_closed:
            return False
        return lost > self.cost or self.spent + self.cost <= self.SHARE * self.time

    def charge(self) -> None:
        """Takes note that something is captured that no step needs."""
        self.spent += self.cost
