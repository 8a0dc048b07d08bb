"""Two processes that train together (gloo, on the CPU) must end with the same weights: those of all their batches."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.goldens import trained_prompts
from support.ranks import results_of_ranks


OPTIONS = {
    "eagle3": {"unroll_steps": 2},
    "dflash": {"block_size": 3, "num_layers": 1, "draft_vocab_size": 100},
    "dspark": {"block_size": 2, "num_layers": 1, "num_anchors": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_processes_end_with_the_same_weights(tmp_path: Path, kind: str) -> None:
    """From the first run on: it evaluates before its first step."""
    (tmp_path / "options.json").write_text(json.dumps({"kind": kind, **OPTIONS[kind]}))
    numbers = random.Random(0)
    prompts = trained_prompts()["prompts"]
    texts = [[token for _ in range(3) for token in numbers.choice(prompts)][:48] for _ in range(60)]
    lines = [json.dumps({"text": " ".join(f"t{token}" for token in text)}) + "\n" for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    first, second = results_of_ranks(Path(__file__).with_name("two_processes.py"), tmp_path, "cpu")
    assert first["steps"] == second["steps"] >= 4
    assert first["weights"] == second["weights"] and first["sum"] == second["sum"]
    assert first["before"]["eval_loss"] > first["after"]["eval_loss"] > 0
    assert json.loads((tmp_path / "out" / "before.json").read_text()) == first["before"]
