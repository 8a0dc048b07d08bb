"""
`hf-specdec bench --suite gpu`: the project's speed targets, measured.

| | what | to reach |
|---|---|---|
| P1 | verify 64 nodes, 8B shape, 1k context, over the model's matmuls alone | ≤ 1.25 |
| P2 | part of a step that is not forwards (target's and draft's, captured alone) | ≤ 5 % |
| P3 | 8B shape, a pair with 4.5 tokens a step, over eager / static / assisted | ≥ 12 / 4 / 5 |
| P4 | SmolLM2 and a head, over eager / static | ≥ 20 / 3 |
| P6, P7 | tree attention, rejection sampling: the kernels' own benchmarks | theirs |
| P8 | tokens a step at T = 1, drawn and rejected over best and drawn from p, as many nodes | ≥ 1.10 |
"""

from .run import GOALS, TARGETS, Entry, Options, run


__all__ = ["GOALS", "TARGETS", "Entry", "Options", "run"]
