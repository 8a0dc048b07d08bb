"""`tree="auto"` in captured steps on a simulated device: no later call waits for a capture, and choices are good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import limits
from support.heads import tiny_head
from support.models import prompts, tiny_model
from support.simulated import expected_tokens, mean
from support.simulated_device import CHANCES, DEVICES, Simulation, simulate

from hf_specdec import SpeculativeConfig
from hf_specdec.trees.auto import AutoTree
from hf_specdec.trees.candidate_trees import CandidateTrees


DEVICE = DEVICES["compiled"]
CANDIDATES = [None, *CandidateTrees(AutoTree()).trees]


def best_rate(simulation: Simulation, rows: int) -> float:
    """Tokens per second with the best of all trees, and without any."""
    chances, device = [[*simulation.chances]] * 8, simulation.device
    return max(1e3 * rows * expected_tokens(tree, chances) / device.step(tree, rows) for tree in CANDIDATES)


def rate(simulation: Simulation, rows: int) -> float:
    """Tokens per second of the present call's steps in which no row had ended."""
    steps = [step for step in simulation.steps[1:] if step.rows == rows]
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_later_calls(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They capture nothing, and what was timed with more rows misleads none: each number of rows has its best tree."""
    simulation = simulate(monkeypatch, replace(DEVICE, host=0.3), CHANCES[temperature])
    target = tiny_model(dtype=torch.float32)
    options: dict[str, Any] = {"assistant_model": tiny_head(target), "tree": "auto", "max_new_tokens": 120}
    options |= {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
    for rows in (8, 1):
        rates = []
        for call in range(5 if rows > 1 else 13):
            simulation.begin_call()
            target.generate(**prompts(rows, 9), **options)
            assert bool(simulation.captured) == (call == 0)
            rates.append(rate(simulation, rows) / best_rate(simulation, rows))
        assert mean(rates[1:]) > 0.88, rows


def test_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured does not depend on the first text: where nothing is accepted, later ones find their trees."""
    simulation = simulate(monkeypatch, DEVICE, (0.0, 0.0))
    target = tiny_model(dtype=torch.float32)
    head, kinds = tiny_head(target), []
    for chances in ((0.0, 0.0), (0.9, 0.05), (0.3, 0.2, 0.15)):
        simulation.chances = chances
        for _ in range(2):
            simulation.begin_call()
            target.generate(**prompts(8, 9), assistant_model=head, tree="auto", max_new_tokens=120, do_sample=False)
            kinds.append(len(simulation.captured))
        assert rate(simulation, 8) > 0.85 * best_rate(simulation, 8)
    assert kinds[0] > 5 and not any(kinds[1:])


def test_weights_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs are gone, so that the next call tries trees as the first did."""
    simulation = simulate(monkeypatch, DEVICE, CHANCES[0.0])
    target, found = tiny_model(dtype=torch.float32), []
    head = tiny_head(target)
    for call in range(4):
        if call == 2:
            target.lm_head.weight.data = target.lm_head.weight.data.clone()
        simulation.begin_call()
        target.generate(**prompts(2, 9), assistant_model=head, tree="auto", max_new_tokens=90, do_sample=False)
        found.append(len(simulation.captured))
    assert min(found[0], found[2]) > 5 and found[1] == found[3] == 0


@pytest.mark.parametrize("capture", [3e5, 3.0], ids=["dear", "cheap"])
def test_in_flight_a_capture_must_pay(capture: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tree is tried at first. Others are captured once steps have lost as much for want of them."""
    simulation = simulate(monkeypatch, replace(DEVICE, capture=capture), CHANCES[0.0])
    target = tiny_model(dtype=torch.float32)
    options: dict[str, Any] = {"assistant_model": tiny_head(target), "do_sample": False, "max_new_tokens": 150}
    config = limits(100, max_requests_per_batch=2)
    trees, rates = set(), []
    for _ in range(9):
        simulation.begin_call()
        target.generate_batch(
            [[4, 5, 6]],
            persistent_manager=True,
            speculative_config=SpeculativeConfig(tree="auto"),
            continuous_batching_config=config,
            **options,
        )
        trees |= {kind.tree for kind in simulation.captured if kind is not None}
        rates.append(rate(simulation, 1) / best_rate(simulation, 1))
    target.destroy_cached_continuous_batching_manager()
    if capture > 100:
        assert len(trees) == 2  # none, and one that is tried
    else:
        assert len(trees) > 2 and mean(rates[3:]) > 0.88
