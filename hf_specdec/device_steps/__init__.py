"""
Whole steps on the device, each one replay of one captured CUDA graph: the draft's levels, the target's forward, the
walk, the commit, and the draft's catching up.

- `rows`: state of the rows, on the device.
- `drafts`: the draft's part of a step.
- `drawing`: the distribution from which children are drawn.
- `verdicts`: the walk: greedy, by draws from p, or by rejection.
- `step`: the parts in order, captured once and replayed for other calls.
- `obstacles`: which calls run like this, and what keeps others from it.
- `captures`: the captured step that a call gets.
- `reports`: reading what a step reports while its next run is on its way.
- `loop`: the host's part: launching steps, reading their reports one step behind.
"""

from .captures import any_number_of_shapes
from .loop import run_device_steps
from .reports import HostCopy, Reports


__all__ = ["HostCopy", "Reports", "any_number_of_shapes", "run_device_steps"]
