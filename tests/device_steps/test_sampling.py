"""Whole steps on the device that draw: against the enumerated distribution, and with seeds."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, Fit, fit
from support.models import noisy_copy, prompts, tiny_model
from support.sampling import (
    ALL_SETTINGS,
    LIMITS,
    PROCESSED_SETTINGS,
    TREE,
    a_draft,
    a_head,
    expected_tokens,
    sampled_tokens,
    the_target,
)
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from hf_specdec import SpeculativeConfig, last_metrics
from hf_specdec.drafters import growth
from hf_specdec.engine.captured.drawing import Drawing
from hf_specdec.engine.captured.nodes import Places
from hf_specdec.engine.captured.processing import Processing
from hf_specdec.engine.captured.rows import InFlightRows
from hf_specdec.engine.captured.verdicts import Verdict
from hf_specdec.trees import DraftTree
from hf_specdec.verification import DraftTemperature


TARGET_WALK = SpeculativeConfig(tree=TREE, draft_sampling="greedy", cuda_graphs=True)
METHODS = {
    "target, best tokens": TARGET_WALK,
    "target, drawn": SpeculativeConfig(tree=TREE, draft_sampling="sample", verification="target", cuda_graphs=True),
    "rejection": SpeculativeConfig(tree=TREE, cuda_graphs=True),
    "rejection, budgets": SpeculativeConfig(tree=LIMITS, draft_sampling="sample", cuda_graphs=True),
}


ROWS = 1_000
KERNEL_SETTINGS = ("plain", "temperature", "top-k", "top-p")
FAST = {
    ("noisy", "plain", "target, best tokens"),
    ("noisy", "temperature", "rejection"),
    ("noisy", "top-p", "target, drawn"),
    ("noisy", "all filters", "rejection"),
    ("noisy", "penalties", "rejection"),
    ("head", "top-k", "rejection, budgets"),
}
"""Each way to verify, and each kind of processors."""


def sampled(assistant: str, setting: str, method: str = "target, best tokens") -> Fit:
    """How well the first tokens of many rows fit: a bias of 0.23 is found, as by the wrong samplers below."""
    target = copy.deepcopy(the_target()).float()
    draft = copy.deepcopy(a_head(5) if assistant == "head" else a_draft(assistant)).float()
    new = sampled_tokens(target, draft, METHODS[method], ROWS, **ALL_SETTINGS[setting])
    return fit(new, expected_tokens(setting))


@pytest.mark.parametrize(
    "assistant, setting, method",
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for assistant in ("noisy", "other", "head")
        for setting in (*KERNEL_SETTINGS, *PROCESSED_SETTINGS)
        for method in METHODS
        # Drawn children are made with the warpers of p; one way to verify them does for most.
        if method in ("target, best tokens", "rejection")
        or (assistant, setting) in (("noisy", "top-p"), ("head", "top-k"))
        for case in [(assistant, setting, method)]
    ],
)
def test_the_distribution(assistant: str, setting: str, method: str, steps: Steps) -> None:
    found = sampled(assistant, setting, method)
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found


def test_one_random_number_for_all_nodes_does_not_fit(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that is wrong is found: here tokens of one step are drawn by the same number."""
    draw = torch.rand
    monkeypatch.setattr(
        torch, "rand", lambda shape, **options: draw(shape[0], 1, **options).expand(shape).contiguous()
    )
    assert sampled("noisy", "plain").p_value < 1e-6


def test_warpers_of_another_call_do_not_fit(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    load = InFlightRows._load_tables

    def at_one(self: InFlightRows, requests: Any) -> bool:
        has_changed = load(self, requests)
        self._host["temperature"][:] = 1.0
        return has_changed

    monkeypatch.setattr(InFlightRows, "_load_tables", at_one)
    assert sampled("noisy", "temperature").p_value < 1e-6


@pytest.mark.parametrize("wrong", ["before the temperature", "at the root", "without the path", "path alone"])
@pytest.mark.some_cases(1)
def test_processors_at_another_place_do_not_fit(wrong: str, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters of the logits as they are; what looks at the text without the path, or at one that does not grow."""
    setting = {"before the temperature": "all filters", "at the root": "hidden tokens"}.get(wrong, "penalties")
    if wrong == "without the path":
        place = Places.of_tree
        monkeypatch.setattr(Places, "of_tree", lambda *tree: place(*tree)._replace(paths=place(*tree).paths * 0 - 1))
    elif wrong == "path alone":
        monkeypatch.setattr(InFlightRows, "_load_texts", lambda self, requests: None)
    elif wrong == "at the root":
        place = Places.of_tree
        monkeypatch.setattr(Places, "of_tree", lambda *tree: place(*tree)._replace(depths=0 * place(*tree).depths))
    else:
        monkeypatch.setattr(Processing, "_scores", lambda self, logits: logits.float())
    assert sampled("noisy", setting).p_value < SIGNIFICANCE


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "q without processors"])
def test_a_draft_that_is_the_target_is_always_accepted(
    is_wrong: bool, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children are drawn with the processors of p, but those that look at the length of the text."""
    if is_wrong:
        monkeypatch.setattr(Processing, "filters", False)
    target, config = copy.deepcopy(the_target()).float(), SpeculativeConfig(tree=TREE, cuda_graphs=True)
    options = ALL_SETTINGS["all filters"] | {"suppress_tokens": [6], "min_length": 6, "eos_token_id": 6}
    ids = torch.tensor([[5, 5, 3, 7]]).expand(200, -1)
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "speculative_config": config}
    target.generate(ids, **options, assistant_model=target, do_sample=True, max_new_tokens=2 + TREE.depth)
    assert steps.replays > 0
    assert (last_metrics().accepted_per_step == [[TREE.depth]] * 200) is not is_wrong


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["index", "temperature"])
def test_children_of_another_distribution_do_not_fit(
    wrong: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tested with the root's q; or drawn at one temperature and tested at another."""
    if wrong == "index":
        index = growth.static._score_index
        monkeypatch.setattr(growth.static, "_score_index", lambda *tree: torch.zeros_like(index(*tree)))
    else:
        walk = Verdict.walk

        def walk_hotter(self: Verdict, logits: Any, tokens: Any, draft: DraftTree, *rest: Any, **options: Any) -> Any:
            return walk(self, logits, tokens, replace(draft, scores=draft.scores / 3), *rest, **options)

        monkeypatch.setattr(Verdict, "walk", walk_hotter)
    assert sampled("noisy", "plain", "rejection").p_value < 1e-6


@pytest.mark.parametrize("filters", [{"top_k": 0}, {"top_k": 0, "top_p": 0.9}], ids=["plain", "top-p"])
@pytest.mark.some_cases(1)
def test_the_temperature_of_the_draft_is_learnt(filters: dict[str, Any], steps: Steps) -> None:
    """As without graphs, a step later: from a draft that is too flat tokens are drawn at a low temperature."""
    target = tiny_model(dtype=torch.float32, sharpness=6.0)
    draft, values = noisy_copy(target, 0.05), []
    draft.lm_head.weight.data /= 3
    learn = DraftTemperature.learn
    for cuda_graphs in (False, True):
        learnt: list[float] = []
        config = SpeculativeConfig(tree=TREE, cuda_graphs=cuda_graphs)
        with pytest.MonkeyPatch.context() as patch:

            def note(self: DraftTemperature, found: list[float], learnt: list[float] = learnt) -> None:
                learn(self, found)
                learnt.append(self.value)

            patch.setattr(DraftTemperature, "learn", note)
            torch.manual_seed(0)
            options = {"max_new_tokens": 40, "do_sample": True, "assistant_model": draft}
            target.generate(**prompts(2, 9), **options, **filters, speculative_config=config)
        values.append(learnt)
    assert steps.captures == 1 and len(values[1]) > 4
    assert values[0][-1] == values[1][-1] < 1.0


@pytest.mark.parametrize("value", [0.25, 1.0, 2.0])
def test_the_temperature_of_the_draft_does_not_move_its_filters(value: float) -> None:
    """As on the host: else its overlaps with p at other temperatures would say nothing."""
    logits = 3.0 * torch.randn(2, 4, 61, generator=torch.Generator().manual_seed(0))
    drafter, warpers = SimpleNamespace(), {"temperature": torch.tensor([1.0, 0.7]), "top_p": torch.tensor([0.9, 0.5])}
    scores = Drawing(drafter, torch.full((2,), value), Processing(warpers)).warp(logits)
    for row in range(2):
        temperature, top_p = (float(values[row]) for values in warpers.values())
        warp = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)])
        assert torch.allclose(scores[row], warp(None, logits[row]) / value, atol=1e-5)


def test_seeds(steps: Steps) -> None:
    """The call that captures draws what later calls draw; a batch's rows differ."""
    target = tiny_model(dtype=torch.float32)
    draft, found = noisy_copy(target, 0.05), []
    for _ in range(3):
        torch.manual_seed(5)
        options = {"max_new_tokens": 20, "do_sample": True, "assistant_model": draft}
        found.append(target.generate(**prompts(2, 9), **options, speculative_config=TARGET_WALK).tolist())
    assert steps.captures == 1 and found[0] == found[1] == found[2]


def test_a_call_with_other_values_takes_the_same_capture(steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05)
    for temperature in (1e-4, 5.0):
        torch.manual_seed(0)
        options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": temperature, "top_k": 0}
        text = target.generate(**prompts(1, 9), **options, assistant_model=draft, speculative_config=TARGET_WALK)
        greedy = target.generate(**prompts(1, 9), max_new_tokens=20, do_sample=False)
        assert torch.equal(text, greedy) is (temperature < 1)
    assert steps.captures == 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_nothing_to_draw_from(batch_size: int, steps: Steps) -> None:
    """A token whose embedding is no number leaves the next one without a distribution: an error, as without us."""
    target = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    draft = noisy_copy(target, 0.05)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 1e-4, "top_k": 0}
    inputs = prompts(batch_size, 9)
    text = target.generate(**inputs, **options)
    before = set(text[:, :13].flatten().tolist())
    token = next(token for token in text[0, 13:].tolist() if token not in before)
    target.get_input_embeddings().weight.data[token] = torch.nan
    for drafting in ({}, {"assistant_model": draft, "speculative_config": TARGET_WALK}):
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            target.generate(**inputs, **options, **drafting)
        assert not drafting or torch.equal(state, torch.get_rng_state())
    assert steps.replays > 0
