"""`tree="auto"` in captured steps on a simulated device: calls wait for captures that pay, and choices are good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import limits
from support.heads import tiny_head
from support.models import prompts, tiny_model
from support.simulated import expected_tokens, mean
from support.simulated_device import CHANCES, DEVICES, Simulation, simulate

from hf_specdec import DynamicTree, SpeculativeConfig
from hf_specdec.engine.captured import captured as captured_steps
from hf_specdec.engine.captured import step as decoding_steps
from hf_specdec.engine.captured.captured import CapturedStep
from hf_specdec.trees.auto import AutoTree
from hf_specdec.trees.candidate_trees import CandidateTrees


DEVICE = DEVICES["compiled"]
Generate = Callable[..., torch.Tensor]
CANDIDATES = [None, *CandidateTrees(AutoTree()).trees]


def best_rate(simulation: Simulation, rows: int) -> float:
    """Tokens per second with the best of all trees, and without any."""
    chances, device = [[*simulation.chances]] * 8, simulation.device
    return max(1e3 * rows * expected_tokens(tree, chances) / device.step(tree, rows) for tree in CANDIDATES)


def rate(simulation: Simulation, rows: int) -> float:
    """Tokens per second of the present call's steps in which no row had ended."""
    steps = [step for step in simulation.steps[1:] if step.rows == rows]
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Generate:
    """Calls of new models on a simulated device: `generate(simulation, rows, temperature, tree)`."""
    target = tiny_model(dtype=torch.float32)
    head = tiny_head(target)

    def call(
        simulation: Simulation, rows: int, temperature: float = 0.0, tree: Any = "auto", **config: Any
    ) -> torch.Tensor:
        simulation.begin_call()
        options = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
        own: dict[str, Any] = {"assistant_model": head, "tree": tree, "max_new_tokens": 128, **config}
        return target.generate(**prompts(rows, 9), **own, **options)

    return call


def captured(simulation: Simulation) -> list[Any]:
    """What the present call captured, apart from prompts: trees, None for no tree, "reads" for a head that reads."""
    return ["reads" if kind.reads else kind.tree for kind in simulation.captured if kind is not None]


@pytest.mark.parametrize(
    ("asked", "disabled_at", "with_trees", "without"),
    [
        ("auto", None, {True}, {False}),
        ("chain:3", None, {True}, {True}),
        ("chain:3", 8, {True}, {False}),
        ("chain:3", 0, set(), {False}),
        ([(0, "chain:3")], None, {False}, {False}),
    ],
    ids=["auto", "fixed", "below a load", "without trees", "schedule"],
)
def test_what_auto_begins_with_is_compiled_as_if_it_were_fixed(
    asked: Any,
    disabled_at: int | None,
    with_trees: set[bool],
    without: set[bool],
    generate: Generate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a whole; what else it may take, layer by layer."""
    do_not_compile(monkeypatch)
    simulation = simulate(monkeypatch, DEVICE, CHANCES[0.0])
    config = SpeculativeConfig(tree=asked, compile=True, disable_by_batch_size=disabled_at)
    generate(simulation, 1, tree=None, speculative_config=config)
    kinds = [kind for kind in simulation.captured if kind is not None and not kind.reads]
    assert all(kind.compiles for kind in kinds)
    assert {kind.compiles_whole for kind in kinds if kind.tree is not None} == with_trees
    found = {kind.compiles_whole for kind in kinds if kind.tree is None}
    assert found == without or (found < without and asked != "auto")  # which times one


def do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, and nothing is timed."""
    monkeypatch.setattr(CapturedStep, "_compile", lambda step, forward: None)
    for module in (captured_steps, decoding_steps):
        monkeypatch.setattr(module, "compiled_function", lambda function: function)


def test_a_step_that_cannot_be_compiled_as_a_whole(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are, and nothing is captured twice."""
    do_not_compile(monkeypatch)
    simulation, own = simulate(monkeypatch, DEVICE, CHANCES[0.0]), CapturedStep.capture

    def capture(step: CapturedStep, *args: Any) -> None:
        if step.compiles_whole:
            raise RuntimeError("on purpose")
        own(step, *args)

    monkeypatch.setattr(CapturedStep, "capture", capture)
    config = SpeculativeConfig(tree="auto", compile=True)
    with pytest.warns(UserWarning, match="compiled as a whole"):
        generate(simulation, 1, tree=None, speculative_config=config)
    kinds = [kind for kind in simulation.captured if kind is not None and kind.tree is not None]
    assert [(kind.compiles, kind.compiles_whole) for kind in kinds] == [(True, False)]
    generate(simulation, 1, tree=None, speculative_config=config)
    assert not [kind for kind in simulation.captured if kind is not None and kind.tree == kinds[0].tree]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.some_cases(1)
def test_the_first_calls(temperature: float, rows: int, generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The first one captures what a call with the drafter's own tree does, and steps without a tree; further captures
    never take longer than decoding.
    """
    simulation = simulate(monkeypatch, DEVICES["captured"], CHANCES[temperature])
    capture, counts, seconds = simulation.device.capture / 1e3, [], 0.0
    for call in range(10):
        generate(simulation, rows, temperature)
        counts.append(len(captured(simulation)))
        if call == 0:
            plain, own = captured(simulation)
            assert plain is None and isinstance(own, DynamicTree)
        seconds += sum(step.seconds - step.capturing for step in simulation.steps)
        assert capture * sum(counts[1:]) < 1.1 * seconds
    assert counts[0] == 2 and sum(counts[1:]) < 6


def test_a_first_call_beside_one_with_a_fixed_tree(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one capture longer, and what its eight steps without enough tokens take."""
    found = []
    for tree in (DynamicTree(depth=5, top_k=3, num_nodes=15), "auto"):
        with monkeypatch.context() as patch:
            simulation = simulate(patch, DEVICES["captured"], CHANCES[1.0])
            target = tiny_model(dtype=torch.float32)
            own: dict[str, Any] = {"assistant_model": tiny_head(target), "tree": tree, "do_sample": True, "top_k": 0}
            begin = simulation.now
            target.generate(**prompts(1, 9), max_new_tokens=128, **own)
            found.append((simulation.now - begin, len(simulation.captured)))
    assert found[1][1] == found[0][1] + 1
    assert found[1][0] < 1.2 * found[0][0] + simulation.device.capture / 1e3


@pytest.mark.slow
@pytest.mark.parametrize("chances", [(0.93, 0.02), (0.3, 0.05)], ids=["deeper", "smaller"])
def test_a_tree_far_from_the_own_one_is_found(
    chances: tuple[float, ...], generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within five calls of usual length, although a capture takes as long as one of them."""
    simulation, rates = simulate(monkeypatch, DEVICES["captured"], chances), []
    for _ in range(13):
        generate(simulation, 8)
        rates.append(rate(simulation, 8) / best_rate(simulation, 8))
    assert mean(rates[5:]) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_later_calls(temperature: float, generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed with more rows misleads none: each number of rows has its best tree once captures have paid."""
    simulation = simulate(monkeypatch, replace(DEVICE, host=0.3, capture=3.0), CHANCES[temperature])
    for rows in (8, 1):
        rates = []
        for _ in range(5 if rows > 1 else 13):
            generate(simulation, rows, temperature)
            rates.append(rate(simulation, rows) / best_rate(simulation, rows))
        assert mean(rates[1:]) > 0.85, rows


@pytest.mark.slow
def test_texts_that_change(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was accepted of the first texts, later ones find their trees."""
    simulation = simulate(monkeypatch, replace(DEVICE, capture=3.0), (0.0, 0.0))
    for chances in ((0.0, 0.0), (0.9, 0.05), (0.3, 0.2, 0.15)):
        simulation.chances = chances
        for _ in range(4):
            generate(simulation, 8)
        assert rate(simulation, 8) > 0.85 * best_rate(simulation, 8)


def test_one_capture_between_two_steps(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate(monkeypatch, replace(DEVICE, capture=0.1), CHANCES[1.0])
    for _ in range(3):
        generate(simulation, 1, 1.0)
        assert max(step.captures for step in simulation.steps) <= 1


def test_weights_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs are gone, so that the next call captures as the first did."""
    simulation, found = simulate(monkeypatch, DEVICE, CHANCES[0.0]), []
    target = tiny_model(dtype=torch.float32)
    head = tiny_head(target)
    for call in range(4):
        if call == 2:
            target.lm_head.weight.data = target.lm_head.weight.data.clone()
        simulation.begin_call()
        target.generate(**prompts(2, 9), assistant_model=head, tree="auto", max_new_tokens=90, do_sample=False)
        found.append(len(captured(simulation)))
    assert found == [2, 0, 2, 0]


@pytest.mark.parametrize("capture", [3e5, 3.0], ids=["dear", "cheap"])
@pytest.mark.some_cases(1)
def test_in_flight_a_capture_must_pay(capture: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's own tree is tried at first. Others are captured once steps have lost as much for want of them."""
    simulation = simulate(monkeypatch, replace(DEVICE, capture=capture), (0.93, 0.02))  # deeper trees do better
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
