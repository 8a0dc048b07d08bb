"""What captures of CUDA graphs may cost that no step needs."""

from __future__ import annotations


class CaptureBudget:
    """
    Says whether to capture what steps could do without, as another tree of `tree="auto"`, or a graph in spare time. A
    capture is worth it if steps would lose, for want of it, more than it takes: in as much decoding as there has been
    so far, and in `HORIZON` seconds at least. It waits until decoding has taken as long as such captures together with
    this one, so that they never take more than half of the time. Where nothing is known to be lost, captures may take
    a small share of it.

    Args:
        cost (`float`): seconds of a usual capture, before any was timed.
        share (`float`): share of the time for captures for want of which nothing is known to be lost.
    """

    HORIZON = 10.0
    """Seconds of decoding for which a process is expected to run on at least."""

    def __init__(self, cost: float = 0.3, share: float = 0.1):
        self.cost, self.share = cost, share
        """Seconds that the last capture took, and the share of the time for those that promise nothing."""
        self.time = self.spent = self.spent_on_trials = 0.0
        """Seconds of decoding so far, and those of captures that pay, and of captures that promise nothing."""
        self.is_closed = False
        """Whether nothing may be captured between steps, since graphs are captured ahead."""

    def allows(self, lost: float = 0.0, time: float = 0.0) -> bool:
        """
        Whether a capture is worth it.

        Args:
            lost (`float`): seconds that steps have lost for want of it.
            time (`float`): seconds of the decoding steps in which these were lost.
        """
        if self.is_closed:
            return False
        is_cheap = self.spent_on_trials + self.cost <= self.share * self.time
        return is_cheap or (self._pays(lost, time) and self.spent + self.cost <= self.time)

    def charge(self, lost: float = 0.0, time: float = 0.0) -> None:
        """Takes note that something is captured that no step needs; arguments as of `allows`."""
        if self._pays(lost, time):
            self.spent += self.cost
        else:
            self.spent_on_trials += self.cost

    def _pays(self, lost: float, time: float) -> bool:
        return lost * max(1.0, self.HORIZON / max(time, 1e-9)) > self.cost
