"""Log-probabilities of requests in flight: those of plain `generate`, by the host and in whole steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, ragged_prompts
from support.graphs import install_stand_in
from support.heads import tiny_head
from support.log_probabilities import check
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.engine.captured.log_probabilities import CapturedLogprobs
from hf_specdec.engine.captured.prompt_step import PromptStep
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.log_probabilities import StepLogprobs
from hf_specdec.graphs.paged import PagedGraphs
from hf_specdec.verification import Walk
from hf_specdec.verification.log_probabilities import log_probabilities, token_logprobs


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

PROMPTS = ragged_prompts((5, 1, 9, 14, 3))
WARPED = {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": WARPED | {"seed": 3},
    "by rejection": WARPED | {"top_k": 0, "top_p": 1.0},
    "filtered": WARPED | {"repetition_penalty": 0.8, "min_p": 0.02},
    "penalised": {"repetition_penalty": 1.4, "suppress_tokens": [*range(30, 40)]},
    "biased": {"sequence_bias": [[[5], 2.0], [[9], 1.5], [[9, 5], -3.0]], "no_repeat_ngram_size": 2},
}
ASKED = ((4, "raw"), (0, "processed"), (3, "processed"), (None, None), (20, "raw"))
"""Number of best tokens and mode of each prompt's request."""


@cache
def target() -> PreTrainedModel:
    return tiny_model(dtype=torch.float32)


def outputs_of(kinds: dict[str, Any], draft: Any, tree: Any, **limit: Any) -> list[tuple[Any, Any, Any, Any]]:
    """Results of requests of all kinds, side by side, each with what it has asked for."""
    off: dict[str, Any] = {} if tree is not None else {"disable_by_batch_size": 0}
    config = SpeculativeConfig(tree=tree or "[(0,)]", **off)
    manager = target().init_continuous_batching(
        assistant_model=draft, speculative_config=config, continuous_batching_config=limits(**limit)
    )
    torch.manual_seed(0)
    added = []
    for number, options in enumerate(kinds.values()):
        for place, prompt in enumerate(PROMPTS):
            best, mode = ASKED[(place + number) % len(ASKED)]
            name = manager.add_request(
                prompt, max_new_tokens=10, eos_token_id=-1, top_logprobs=best, logprobs_mode=mode, **options
            )
            added.append((name, best, mode, options))
    with manager:
        found = [(manager.get_result(name, timeout=60), *rest) for name, *rest in added]
    assert limit.get("num_blocks") is None or manager.state.num_preemptions > 0
    assert_nothing_left(manager)
    assert sum(output.speculation.num_accepted_tokens for output, *_ in found) > (0 if tree is not None else -1)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("tree", [IRREGULAR, TokenTree.chain(3), None], ids=["tree", "chain", "off"])
@pytest.mark.some_cases(1)
def test_steps_on_the_host(tree: Any) -> None:
    for output, *asked in outputs_of(KINDS, noisy_copy(target(), 0.05), tree):
        check(target(), output, *asked)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["host", "device"])
def test_after_preemptions(by: str, request: pytest.FixtureRequest) -> None:
    if by == "device":
        request.getfixturevalue("whole_steps")
    for output, *asked in outputs_of(KINDS, noisy_copy(target(), 0.05), IRREGULAR, num_blocks=14):
        check(target(), output, *asked)


def next_node(walk: Walk) -> Walk:
    return replace(walk, paths=[path and [*path[1:], path[-1]] for path in walk.paths])


@pytest.mark.parametrize("by", ["host", "device"])
def test_a_wrong_version_is_seen(by: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """One that takes a token's log-probability at another node of the path than the one before it."""
    give, note = StepLogprobs.give, CapturedLogprobs.note

    def later(self: CapturedLogprobs, logits: torch.Tensor, path: torch.Tensor, new: torch.Tensor) -> None:
        note(self, logits, path.roll(-1, dims=1), new)

    if by == "device":
        request.getfixturevalue("whole_steps")
        monkeypatch.setattr(CapturedLogprobs, "note", later)
    else:
        monkeypatch.setattr(StepLogprobs, "give", lambda self, walk: give(self, next_node(walk)))
    found = outputs_of({"greedy": {}}, noisy_copy(target(), 0.05), IRREGULAR)
    with pytest.raises(AssertionError):
        for output, *asked in found:
            check(target(), output, *asked)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=["raw", "processed"])
def test_as_in_the_manager_of_transformers(options: dict[str, Any]) -> None:
    """By its own option, which is the default of all requests."""
    config = GenerationConfig(max_new_tokens=10, eos_token_id=2, pad_token_id=0, **options)
    call = {"generation_config": config, "continuous_batching_config": limits(return_logprobs=True)}
    own = target().generate_batch(PROMPTS, **call)
    ours = target().generate_batch(PROMPTS, assistant_model=noisy_copy(target(), 0.05), tree=IRREGULAR, **call)
    for plain, output in zip(own.values(), ours.values(), strict=True):
        assert output.generated_tokens == plain.generated_tokens and not output.top_logprobs
        assert output.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "asked, kind, words",
    [
        ({"top_logprobs": 21}, ValueError, "from 0 to 20, but is 21"),
        ({"top_logprobs": True}, TypeError, "must be an integer, but is bool"),
        ({"logprobs_mode": "logits"}, ValueError, 'must be "raw" or "processed", but is \'logits\''),
    ],
)
def test_refusals(asked: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        target().generate_batch(PROMPTS, assistant_model=noisy_copy(target()), tree="[(0,)]", **asked)


def test_fewer_tokens_than_are_asked_for() -> None:
    values, tokens = log_probabilities(torch.tensor([[0.0, -torch.inf, 1.0]]), torch.tensor([0]), 5)
    (found,) = token_logprobs(values.tolist(), tokens.tolist(), 4)
    assert found.best == [(2, pytest.approx(-0.3133, abs=1e-4)), (0, found.value)]


# --------------------------------------------------------------------------------------------------------- whole steps


@pytest.fixture
def whole_steps(monkeypatch: pytest.MonkeyPatch, runs: list[InFlightStep]) -> list[InFlightStep]:
    """The decoding steps that have run."""
    monkeypatch.setattr(PagedGraphs, "prompt_widths", (4, 16))
    install_stand_in(monkeypatch, with_kernel=True)
    return runs


@pytest.fixture
def whole_prompts(monkeypatch: pytest.MonkeyPatch) -> list[PromptStep]:
    """The prefill steps that have run."""
    found: list[PromptStep] = []
    launch = PromptStep.launch
    monkeypatch.setattr(PromptStep, "launch", lambda self: found.append(self) or launch(self))
    return found


@pytest.mark.smoke
@pytest.mark.parametrize(
    "tree", [IRREGULAR, DynamicTree(depth=3, top_k=3, num_nodes=6), None], ids=["tree", "dynamic", "off"]
)
@pytest.mark.some_cases(1)
def test_whole_steps(tree: Any, whole_steps: list[InFlightStep], whole_prompts: list[PromptStep]) -> None:
    for output, *asked in outputs_of(KINDS, noisy_copy(target(), 0.05), tree):
        check(target(), output, *asked)
    assert len(whole_steps) > 8 and all(step.kind.best is not None for step in whole_steps)
    assert any(step._logprobs is not None for step in whole_prompts)


def test_whole_steps_find_none_where_nobody_asks(
    whole_steps: list[InFlightStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the device nor by the host; and what does not ask shares a step with what does."""
    monkeypatch.setattr(StepLogprobs, "_scores_of", None)
    monkeypatch.setattr(CapturedLogprobs, "note", None)
    config = {"tree": IRREGULAR, "continuous_batching_config": limits()}
    outputs = target().generate_batch(PROMPTS, assistant_model=noisy_copy(target(), 0.05), max_new_tokens=14, **config)
    assert not any(output.logprobs or output.top_logprobs for output in outputs.values())
    assert whole_steps and all(step._logprobs is None for step in whole_steps)


def test_whole_steps_of_a_head(whole_steps: list[InFlightStep]) -> None:
    for output, *asked in outputs_of({"greedy": {}}, tiny_head(target()), TokenTree.from_branching((20, 2))):
        check(target(), output, *asked)
    assert whole_steps
