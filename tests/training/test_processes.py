"""Two processes that train together (gloo, on the CPU) must end with the same weights: those of all their batches."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.goldens import trained_prompts
from support.ranks import results_of_ranks


@pytest.mark.slow
def test_processes_end_with_the_same_weights(tmp_path: Path) -> None:
    """From the first run on: it evaluates before its first step."""
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
