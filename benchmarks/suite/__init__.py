"""
The speed targets of the project, measured by benchmarks/speed_targets.py.

| | figure | goal |
|---|---|---|
| P1 | time of verifying 64 nodes, 8B shape, 1k context, over the model's matmuls alone | ≤ 1.25 |
| P2 | share of a step outside the forwards (the target's and the draft's, captured alone) | ≤ 5 % |
| P3 | speed of the 8B shape, a pair with 4.5 tokens per step, over eager / static / assisted | ≥ 12 / 4 / 5 |
| P4 | speed of SmolLM2 with a head, over eager / static | ≥ 20 / 3 |
| P6, P7 | the kernels' own benchmarks of tree attention and rejection sampling | see `GOALS` |
| P8 | tokens per step at T = 1, drawn trees with rejection over best-token trees with a draw from p | ≥ 1.10 |
"""

from .run import GOALS, TARGETS, Entry, Options, run


__all__ = ["GOALS", "TARGETS", "Entry", "Options", "run"]
