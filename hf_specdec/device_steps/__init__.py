"""
Whole steps on the device, each one replay of one CUDA graph: the draft's levels, the target's forward, the walk, the
commit, and the draft's catching up.

- `rows`: what a step knows of the rows.
- `drafts`: the draft's part.
- `verdicts`: the walk, greedy or drawn from p.
- `step`: the parts in order, captured once and replayed for other calls.
- `loop`: the host's part: which calls run like this, launching steps, reading behind what they did.
"""

from .loop import any_number_of_shapes, run_device_steps


__all__ = ["any_number_of_shapes", "run_device_steps"]
