"""Whole steps on the device whose random numbers belong to positions: with one seed always the text of the host."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, Fit, fit
from support.grammar import small_tokenizer
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model
from support.sampling import ALL_SETTINGS, LIMITS, TREE, a_draft, a_head, expected_tokens, sampled_tokens, the_target

from hf_specdec import SpeculativeConfig, TokenTree
from hf_specdec.engine.captured.device_steps import DeviceSteps
from hf_specdec.engine.captured.keys import StepKey
from hf_specdec.engine.captured.rows import InFlightRows
from hf_specdec.plan import SpeculationPlan
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.trees.capture_budget import CaptureBudget
from hf_specdec.trees.step_times import StepTimes
from hf_specdec.trees.whole_times import WholeTimes
from hf_specdec.verification import DeviceNoise, Verifier


TARGET = tiny_model("llama", attention_sharpness=3.0, dtype=torch.float32)
TREES: dict[str, Any] = {"chain": TokenTree.chain(3), "static": TREE, "dynamic": LIMITS}
DRAFTS: dict[str, Any] = {
    "draft model": lambda: noisy_copy(TARGET, 0.05),
    "head": lambda: tiny_head(TARGET),
    "head of few tokens": lambda: tiny_head(TARGET, draft_vocab_size=40),
}


@pytest.fixture
def by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets calls draw by position with the tree that they ask for, as "auto" does with each that it chooses."""
    resolve = SpeculationPlan.resolve

    def resolved(*args: Any, **options: Any) -> SpeculationPlan:
        return replace(resolve(*args, **options), uses_rejection=False, draws_by_position=options["do_sample"])

    monkeypatch.setattr(SpeculationPlan, "resolve", resolved)


def text_of(rows: int, draft: Any, config: SpeculativeConfig, **options: Any) -> list[list[int]]:
    torch.manual_seed(5)
    inputs = prompts(rows, 9, padding=rows > 1)
    options = {"do_sample": True, "max_new_tokens": 16, "pad_token_id": 0, "top_k": 0} | options
    return TARGET.generate(**inputs, **options, assistant_model=draft, speculative_config=config).tolist()


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "temperature": 0.7}], ids=["plain", "filters"])
@pytest.mark.some_cases(1)
def test_every_tree_has_the_host_s_text(kind: str, options: dict[str, Any], steps: Steps, by_position: None) -> None:
    """Drawn or best tokens, in any tree, or none; the drafts are accepted, too."""
    rows, draft = 2, DRAFTS[kind]()
    expected = text_of(rows, draft, SpeculativeConfig(tree=TREE, cuda_graphs=False), **options)
    assert steps.replays == 0
    configs = [SpeculativeConfig(tree=tree, cuda_graphs=True) for tree in TREES.values()]
    configs.append(replace(configs[1], draft_sampling="greedy"))
    configs.append(replace(configs[0], disable_by_batch_size=1))
    for config in configs:
        before = steps.replays
        assert text_of(rows, draft, config, **options) == expected, config
        assert steps.replays > before
    assert expected[0][9:] != expected[1][9:]


def test_grammars(steps: Steps, by_position: None) -> None:
    """The host takes another token where a step's is not allowed: the one that it would have drawn itself."""
    target, draft = copy.deepcopy(the_target()).float(), copy.deepcopy(a_draft("noisy")).float()
    options = {"grammar": LLMatcher.grammar_from_regex("(a|b|ca)[abc](bca|cab)?[abc]{8,}"), "temperature": 0.8}
    texts = []
    for cuda_graphs in (False, True):
        config = SpeculativeConfig(tree=TREE, cuda_graphs=cuda_graphs)
        texts.append(sampled_tokens(target, draft, config, 20, tokenizer=small_tokenizer(), **options).tolist())
    assert steps.replays > 0 and texts[0] == texts[1]


def test_a_batch_has_the_texts_of_calls(steps: Steps, by_position: None) -> None:
    """Equal prompts, too: each row has numbers of its own, which the generator does not see."""
    draft, config = noisy_copy(TARGET, 0.05), SpeculativeConfig(tree=TREE, cuda_graphs=True)
    prompt, found = prompts(1, 9)["input_ids"], []
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 16, "top_k": 0, "pad_token_id": 0}
    options |= {"assistant_model": draft, "speculative_config": config}
    torch.manual_seed(5)
    ids = prompt.expand(3, -1)
    found.append(TARGET.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 9:].tolist())
    states = [torch.get_rng_state()]
    torch.manual_seed(5)
    outputs = TARGET.generate_batch([prompt[0].tolist()] * 3, **options)
    found.append([output.generated_tokens for output in outputs.values()])
    states.append(torch.get_rng_state())
    assert steps.replays > 0 and found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3
    assert torch.equal(*states)


def _method(function: Callable, *first: Any) -> Callable:
    """A method that calls a function with some arguments before its own."""
    return lambda *args, **options: function(*first, *args, **options)


@pytest.fixture
def shuffled_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps seem to take other times in every call, so that "auto" takes other trees."""
    numbers = itertools.count()

    def shuffled(add: Callable, times: Any, tree: Any, *rest: Any, **options: Any) -> None:
        factor = 1.0 + (next(numbers) * 7919 % 13) / (1.0 + (0 if tree is None else tree.num_nodes))
        add(times, tree, *(1e-3 * factor if isinstance(one, float) else one for one in rest), **options)

    for kind in (StepTimes, WholeTimes):
        monkeypatch.setattr(kind, "add", _method(shuffled, kind.add))


@pytest.mark.slow
@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_reproduces_a_call(rows: int, asked: str | None, steps: Steps, shuffled_times: None) -> None:
    """With nothing asked, or with "auto"; the generator goes on from the same state."""
    draft, texts, states, replays = tiny_head(TARGET), [], [], []
    for _ in range(3):
        before = steps.replays
        texts.append(text_of(rows, draft, SpeculativeConfig(tree=asked), max_new_tokens=40))
        states.append(torch.get_rng_state())
        replays.append(steps.replays - before)
    assert texts[0] == texts[1] == texts[2]
    assert all(torch.equal(states[0], state) for state in states)
    assert min(replays) > 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.some_cases(1)
def test_what_is_captured_does_not_change_the_text(
    do_sample: bool, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed, two calls of engines with other graphs: those of the start alone, and then others in turn."""
    config, texts, captures = SpeculativeConfig(tree="auto"), [], []
    monkeypatch.setattr(CaptureBudget, "allows", lambda budget, *lost: False)
    for turns in (None, itertools.cycle((1, None, 0, 2))):
        if turns is not None:
            monkeypatch.setattr(CandidateChoice, "begin_next", lambda choice: False)
            monkeypatch.setattr(CandidateChoice, "_chosen", lambda choice, turns=turns: _next_tree(choice, turns))
        draft, before = tiny_head(TARGET), steps.captures
        for _ in range(2):
            texts.append(text_of(2, draft, config, max_new_tokens=24, do_sample=do_sample))
        captures.append(steps.captures - before)
    assert captures[0] == 2 and captures[1] > 3
    assert all(text == texts[0] for text in texts)


def _next_tree(choice: CandidateChoice, turns: Iterator[int | None]) -> Any:
    turn = next(turns)
    return None if turn is None else choice.candidates[turn]


def sampled(assistant: str, setting: str, tree: str) -> Fit:
    target = copy.deepcopy(the_target()).float()
    draft = copy.deepcopy(a_head(5) if assistant == "head" else a_draft(assistant)).float()
    config = SpeculativeConfig(tree=TREES[tree], cuda_graphs=True)
    return fit(sampled_tokens(target, draft, config, 700, **ALL_SETTINGS[setting]), expected_tokens(setting))


@pytest.mark.parametrize(
    "assistant, setting, tree",
    [("noisy", "top-p", "dynamic"), ("head", "temperature", "static"), ("noisy", "penalties", "static")],
)
@pytest.mark.some_cases(1)
def test_the_distribution(assistant: str, setting: str, tree: str, steps: Steps, by_position: None) -> None:
    found = sampled(assistant, setting, tree)
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.parametrize("wrong", ["one position", "one key"])
@pytest.mark.some_cases(1)
def test_wrong_noise_does_not_fit(
    wrong: str, steps: Steps, by_position: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All levels of a step, or all rows of a call, have the same noise."""
    if wrong == "one position":
        draw = DeviceNoise.draw_at_nodes
        at_root = lambda noise, scores, depths, *heat: draw(noise, scores, 0 * depths, *heat)  # noqa: E731
        monkeypatch.setattr(DeviceNoise, "draw_at_nodes", at_root)
    else:
        load = InFlightRows._load_tables

        def with_one_key(self: InFlightRows, requests: Any) -> bool:
            has_changed = load(self, requests)
            self._host["noise_keys"][:] = 7
            return has_changed

        monkeypatch.setattr(InFlightRows, "_load_tables", with_one_key)
    assert sampled("noisy", "plain", "static").p_value < 1e-6


def test_no_walk_draws_from_the_generator(steps: Steps, by_position: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a manager, which makes one graph for all kinds of rows else."""
    kinds: set[Verifier] = set()
    step_for = DeviceSteps._step_for

    def noted(self: DeviceSteps, wanted: StepKey, *rest: Any) -> Any:
        kinds.update(wanted.kind.kinds)
        return step_for(self, wanted, *rest)

    monkeypatch.setattr(DeviceSteps, "_step_for", noted)
    options = {"do_sample": True, "max_new_tokens": 6, "assistant_model": noisy_copy(TARGET, 0.05)}
    TARGET.generate_batch([[5, 6, 7]], **options, speculative_config=SpeculativeConfig(tree=TREE, cuda_graphs=True))
    assert steps.replays > 0 and kinds == {Verifier.GREEDY, Verifier.BY_POSITION}
