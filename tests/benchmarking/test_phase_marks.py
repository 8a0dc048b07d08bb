"""Phases of captured steps, by marks in the trace of a profiler."""

from __future__ import annotations

import pytest
import torch
from suite.phase_marks import FIRST_MARK, MARK, Phase, PhaseMarks, phases_of, table_of
from support.heads import BLOCK_KINDS, tiny_block_head
from support.models import prompts, tiny_model

from hf_specdec import SpeculativeConfig


STEP = [(FIRST_MARK, 0, 1), ("a", 1, 3), (MARK, 4, 5), ("b", 5, 6), ("c", 7, 9), (MARK, 9, 10), ("d", 12, 13)]
"""Kernels of a step of three marks, the last of which ends it."""
OTHER = [(FIRST_MARK, 0, 1), ("a", 1, 3), (MARK, 4, 5)]


def test_phases_of_a_trace() -> None:
    """Kernels of other kinds of steps, before the first step, and between two, are left out."""
    kernels = [("e", 0.0, 1.0)]
    for begin, step in ((100, STEP), (200, OTHER), (300, STEP)):
        kernels += [(name, begin + start, begin + end) for name, start, end in step]
    found = phases_of(list(reversed(kernels)), {3: ["rest", "verify", "between"], 7: ["no", "such", "step"]})
    assert found == {"rest": Phase(1.0, 2.0, 3.0), "verify": Phase(2.0, 3.0, 4.0)}
    assert table_of(found).splitlines()[-1].split() == ["step", "3.0", "5.0", "7.0"]
    with pytest.raises(ValueError, match="no step with 4 marks"):
        phases_of(kernels, {4: ["rest"] * 4})


@pytest.mark.parametrize("steps", [True], indirect=True)
@pytest.mark.parametrize("kind", ["markov", "dflash"])
@pytest.mark.some_cases(1)
def test_marks_of_captured_steps(kind: str, steps: object) -> None:
    target = tiny_model("llama", dtype=torch.float32)
    head, inputs = tiny_block_head(target, **BLOCK_KINDS[kind]), prompts(2, 9, padding=True)
    launched: list[str] = []
    marks = PhaseMarks(launched.append)
    with marks.set(), torch.no_grad():
        config = SpeculativeConfig(tree="dynamic:3,3,6")
        target.generate(**inputs, assistant_model=head, speculative_config=config, do_sample=False, max_new_tokens=16)
    [names] = marks.of_steps.values()
    assert launched.count(FIRST_MARK) > 0 and launched.count(MARK) % (len(names) - 1) == 0
    pairs = ["pairs", "candidates", "pairs", "rest"] if kind == "markov" else []
    drafting = ["rest", "features' K/V", "rest", "block", "lm_head", "block", "rest", *pairs, "growth"]
    drafting += [] if pairs else ["candidates", "growth"]
    assert names[: len(drafting)] == drafting
    assert names[-1] == "between steps" and {"verify", "walk", "commit"} <= set(names)
