"""
Whole steps of requests in flight on the device, each one replay of one CUDA graph: the draft catches up and grows its
trees, the target's forward, the walk, and the commit. The host fills in the rows, and reads what came of them.

- `rows`: what a step is told of its rows.
- `walks`: how these find their tokens.
- `captured`: what all steps have in common.
- `drafts`: the draft's part.
- `step`: the parts in order, captured once for a size and replayed for whichever requests there are.
- `prompts`: pieces of prompts, read in the same way.
- `runner`: which steps run like this, by which graph, and what the host makes of them.
"""

from .prompts import Reading
from .runner import DeviceSteps, Outcome


__all__ = ["DeviceSteps", "Outcome", "Reading"]
