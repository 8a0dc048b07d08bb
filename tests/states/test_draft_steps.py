"""Drafts with states in captured forwards and captured steps: what they accept is what the host's drafts accept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, runs_of_steps, text_alone
from support.device_steps import install
from support.graphs import install_stand_in
from support.hybrids import hybrid, padded
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree, last_metrics
from hf_specdec.drafters import DraftModelDrafter
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.graphs import CapturedForward


DYNAMIC = DynamicTree(depth=3, top_k=3, num_nodes=9)
CHAIN = TokenTree.chain(2)
SERVED = ("lfm2", "qwen3_5_text", "bamba", "jamba", "mamba2")
PROMPTS = ragged_prompts((5, 30, 1, 12, 2))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[InFlightStep]:
    return runs_of_steps(monkeypatch)


def found(model: Any, draft: Any, tree: Any, cuda_graphs: bool, batch_size: int, **options: Any) -> tuple[Any, ...]:
    """The text, and what was accepted on the way, but near its end."""
    config = SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
    options |= {"do_sample": False, "max_new_tokens": 24, "assistant_model": draft, "speculative_config": config}
    text = model.generate(**padded(batch_size, seed=1), **options).tolist()
    return text, [row[:5] for row in last_metrics().accepted_per_step]


@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("family", SERVED)
@pytest.mark.some_cases(1)
def test_calls(family: str, batch_size: int, tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = hybrid(family), noisy_copy(hybrid(family), 0.03)
    by_torch = found(model, draft, tree, False, batch_size)
    steps = install(monkeypatch, with_kernel=True)
    assert found(model, draft, tree, False, batch_size) == by_torch
    assert found(model, draft, tree, True, batch_size) == by_torch
    assert steps.captures == 1 and steps.replays > 3
    assert by_torch[0] == model.generate(**padded(batch_size, seed=1), do_sample=False, max_new_tokens=24).tolist()
    assert sum(map(sum, by_torch[1])) > 0


def in_flight(model: Any, draft: Any, **sizes: Any) -> tuple[list[list[int]], list[Any]]:
    """Texts of requests side by side, and what was accepted in the steps of each."""
    options = {"assistant_model": draft, "tree": IRREGULAR, "max_new_tokens": 24}
    outputs = model.generate_batch(PROMPTS, **options, continuous_batching_config=limits(**sizes)).values()
    accepted = [one.speculation.accepted_per_step[0][:6] for one in outputs]
    return [one.generated_tokens for one in outputs], accepted


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "jamba"])
@pytest.mark.some_cases(1)
def test_requests_in_flight(family: str, runs: list[InFlightStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are given to other requests, and blocks taken away."""
    model, draft = hybrid(family), noisy_copy(hybrid(family), 0.03)
    by_torch = in_flight(model, draft)
    assert by_torch[0] == [text_alone(model, prompt, max_new_tokens=24) for prompt in PROMPTS]
    install_stand_in(monkeypatch, with_kernel=True)
    assert in_flight(model, draft) == by_torch
    assert in_flight(model, draft, max_requests_per_batch=2) == by_torch
    assert in_flight(model, draft, num_blocks=24)[0] == by_torch[0]
    assert sum(step.kind.tree is not None for step in runs) > 10


@pytest.mark.slow
def test_a_target_without_states(runs: list[InFlightStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are read by captured steps, those of the draft by the host."""
    model, draft = tiny_model(dtype=torch.float32), hybrid("qwen3_5_text")
    by_torch = in_flight(model, draft)
    install_stand_in(monkeypatch, with_kernel=True)
    assert in_flight(model, draft) == by_torch
    assert by_torch[0] == [text_alone(model, prompt, max_new_tokens=24) for prompt in PROMPTS]
    assert len(runs) > 4 and sum(map(sum, by_torch[1])) > 0


@pytest.mark.slow
def test_rows_that_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without a tree for a while is in steps of others, where the draft leaves its states alone."""
    load, slots = InFlightStep.load, []

    def noted(self: InFlightStep, requests: Any, values: Any, *others: Any) -> None:
        slots.append(values.draft_slots)
        load(self, requests, values, *others)

    monkeypatch.setattr(InFlightStep, "load", noted)
    model, draft = hybrid("qwen3_5_text"), noisy_copy(hybrid("qwen3_5_text"), 0.03)
    pauses, accepted = [(0, "[(0,)]"), (5, None), (12, IRREGULAR)], []
    for by_kernel in (False, True):
        if by_kernel:
            install_stand_in(monkeypatch, with_kernel=True)
        options = {"assistant_model": draft, "tree": IRREGULAR, "continuous_batching_config": limits()}
        with model.init_continuous_batching(**options) as manager:
            beside = [manager.add_request(prompt, max_new_tokens=40) for prompt in PROMPTS[3:]]
            name = manager.add_request(PROMPTS[0], tree=pauses, max_new_tokens=30)
            outputs = [manager.get_result(one, timeout=60) for one in (name, *beside)]
        accepted.append(outputs[0].speculation.accepted_per_step[0])
    assert accepted[0] == accepted[1] and sum(accepted[0]) > 3
    assert any(one.count(-1) == 1 and len(one) == 3 for one in slots)


def test_captured_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host must look at every step, forwards of the draft are captured, each level in a graph of its own."""
    model, draft = hybrid("qwen3_5_text"), noisy_copy(hybrid("qwen3_5_text"), 0.03)
    options = {"encoder_repetition_penalty": 1.3}
    by_torch = found(model, draft, IRREGULAR, False, 2, **options)
    stand_in, ran = install_stand_in(monkeypatch, with_kernel=True), []
    call = CapturedForward.__call__
    monkeypatch.setattr(CapturedForward, "__call__", lambda self, *given: ran.append(self) or call(self, *given))
    assert found(model, draft, IRREGULAR, True, 2, **options) == by_torch
    assert found(model, draft, IRREGULAR, True, 2, **options) == by_torch
    assert stand_in.captures > 4 and len({id(one) for one in ran}) > 4


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [False, True])
def test_spoiled_steps(in_flight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose logits are NaN is taken back but for what the draft has read, which enters its states once."""
    target = copy.deepcopy(hybrid("qwen3_5_text"))
    text = text_alone(target, PROMPTS[0], max_new_tokens=60)
    poison = next(token for token in range(10, 60) if token not in text and token not in PROMPTS[0])
    draft = noisy_copy(target, 0.03)
    with torch.no_grad():
        frequent = max(set(text), key=text.count)
        draft.lm_head.weight[poison] = draft.lm_head.weight[frequent] * 1.001
        target.lm_head.weight[poison] = 0.0
        target.get_input_embeddings().weight[poison] = torch.nan
    accepted = []
    for by_kernel in (False, True):
        if by_kernel:
            install_stand_in(monkeypatch, with_kernel=True)
        options = {"assistant_model": draft, "tree": IRREGULAR, "max_new_tokens": 60}
        if in_flight:
            [output] = target.generate_batch(PROMPTS[:1], **options).values()
            assert output.generated_tokens == text
            accepted.append(output.speculation.accepted_per_step[0])
        else:
            ids = torch.tensor(PROMPTS[:1])
            assert target.generate(ids, **options, do_sample=False)[0, len(PROMPTS[0]) :].tolist() == text
            accepted.append(last_metrics().accepted_per_step[0])
    assert accepted[0] == accepted[1] and sum(accepted[0]) > 5


@pytest.mark.slow
def test_a_failed_capture_of_a_second_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft has read in the first part does not enter its states again, in the host's step after it."""
    capture, forward_from, new_after = InFlightStep.capture, DraftModelDrafter.forward_from, []

    def fails_for_chains(self: InFlightStep, *args: Any) -> None:
        if self.kind.tree == CHAIN:
            new_after.append([])
            raise RuntimeError("out of memory")
        capture(self, *args)

    def noted(self: DraftModelDrafter, rows: Any, starts: Any, count: int, new: list[int], **options: Any) -> Any:
        new_after.extend([new] if new_after else [])
        return forward_from(self, rows, starts, count, new, **options)

    install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setattr(InFlightStep, "capture", fails_for_chains)
    monkeypatch.setattr(DraftModelDrafter, "forward_from", noted)
    model, draft = hybrid("lfm2"), noisy_copy(hybrid("lfm2"), 0.03)
    options = {"assistant_model": draft, "tree": IRREGULAR, "continuous_batching_config": limits()}
    with (
        pytest.warns(UserWarning, match="could not be captured"),
        model.init_continuous_batching(**options) as manager,
    ):
        first = manager.add_request(PROMPTS[0], max_new_tokens=60)
        manager.get_result(manager.add_request(PROMPTS[0], max_new_tokens=8))
        second = manager.add_request(PROMPTS[3], max_new_tokens=20, tree=CHAIN)
        assert not any(manager.get_result(name, timeout=60).error for name in (first, second))
    assert new_after[1] == [0] and max(map(max, new_after[2:])) > 0


@pytest.mark.slow
def test_more_nodes_than_kernels_take(runs: list[InFlightStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that would forward more runs by the host, and by torch from there on."""
    model, draft = hybrid("mamba2"), noisy_copy(hybrid("mamba2"), 0.03)
    wide = DynamicTree(depth=4, top_k=24, num_nodes=30)
    by_torch = found(model, draft, wide, False, 2)
    install_stand_in(monkeypatch, with_kernel=True)
    assert found(model, draft, wide, True, 2) == by_torch
    assert not runs
