"""Options that are prepared once: always what `generate` itself would hand to a decoding method."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.models import noisy_copy, tiny_model
from transformers import GenerationConfig, LogitsProcessorList, MinPLogitsWarper, PreTrainedModel, StoppingCriteriaList

import hf_specdec
from hf_specdec.batching import request_plans
from hf_specdec.batching.preparations import Preparations
from hf_specdec.batching.preparing import Prepared, prepare_options


SHARED = (
    {"max_new_tokens": 5},
    {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 3},
    {"max_new_tokens": 9, "do_sample": True, "temperature": 0.7, "eos_token_id": [3, 7]},
    {"max_new_tokens": 9, "do_sample": True, "top_k": 5, "top_p": 0.9, "pad_token_id": 0},
    {"max_new_tokens": 9, "do_sample": True, "min_p": 0.1, "typical_p": 0.9, "suppress_tokens": [4, 5]},
)
NOT_SHARED = (
    {"max_length": 60},
    {"max_new_tokens": 5, "min_new_tokens": 3, "eos_token_id": 3},
    {"max_new_tokens": 5, "min_length": 20, "eos_token_id": 3},
    {"max_new_tokens": 5, "min_length": 2},
    {"max_new_tokens": 5, "min_new_tokens": 2},
    {"max_new_tokens": 5, "repetition_penalty": 1.3},
    {"max_new_tokens": 5, "encoder_repetition_penalty": 1.3},
    {"max_new_tokens": 5, "max_time": 60.0},
    {"max_new_tokens": 5, "sequence_bias": [[[5], 2.0]]},
    {"max_new_tokens": 5, "logits_processor": LogitsProcessorList([MinPLogitsWarper(0.1)])},
    {"max_new_tokens": 5, "stopping_criteria": StoppingCriteriaList()},
    {"max_new_tokens": 5, "prefix_allowed_tokens_fn": lambda row, ids: [1, 2]},
    {"max_new_tokens": 5, "eos_token_id": torch.tensor([3])},
)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model()


class Counted:
    """A model whose `generate` is counted."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.calls = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.model.generate(*args, **kwargs)


def shown(value: Any) -> Any:
    """What is in an object, down to numbers and names."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    if hasattr(value, "__dict__") and not callable(getattr(value, "__get__", None)):
        return type(value).__name__, shown(vars(value))
    return value


def public(config: GenerationConfig) -> dict[str, Any]:
    """The options of a config, without what `generate` notes down there about the inputs."""
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def test_what_is_kept_is_what_generate_prepares(target: PreTrainedModel) -> None:
    counted, choice = Counted(target), random.Random(0)
    preparations = Preparations(counted)
    configs = (None, GenerationConfig(max_new_tokens=8, pad_token_id=0), GenerationConfig(do_sample=True, top_k=3))
    cases = list(itertools.product(configs, SHARED)) * 4
    choice.shuffle(cases)
    for config, options in cases:
        prompt = [5] * choice.randint(1, 40)
        found = preparations.prepare(prompt, config, options, run=1)
        expected = prepare_options(target, prompt, config, options)
        configs_shown = [shown(public(one.config)) for one in (found, expected)]
        assert configs_shown[0] == configs_shown[1], options
        assert shown(found[1:3]) == shown(expected[1:3]), options
        found.config.max_length = 0  # a caller's own
        found.config.speculative_config = object()
        found.criteria.clear()
    assert counted.calls == len(configs) * len(SHARED)


@pytest.mark.parametrize("options", NOT_SHARED, ids=lambda options: str(list(options)[-1]))
def test_what_is_never_kept(target: PreTrainedModel, options: dict[str, Any]) -> None:
    """What reads the prompt, remembers what it sees, or is the caller's."""
    counted = Counted(target)
    preparations = Preparations(counted)
    for length in (9, 30, 9):
        found = preparations.prepare([5] * length, None, options, run=1)
        expected = prepare_options(target, [5] * length, None, options)
        assert [type(one) for one in found.processors] == [type(one) for one in expected.processors]
        assert found.config.max_length == expected.config.max_length
    assert counted.calls == 3


def test_when_it_is_kept(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a run, as long as the model's defaults stay, and not for options that Python alone finds equal."""
    counted = Counted(target)
    preparations = Preparations(counted)

    def prepared(options: dict[str, Any], run: Any = 1) -> tuple[Prepared, int]:
        before = counted.calls
        return preparations.prepare([5, 6], None, options, run), counted.calls - before

    options = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.5}
    assert [prepared(options, run)[1] for run in (1, 1, 2, 2, 1, None, None)] == [1, 0, 1, 0, 1, 1, 1]
    assert [prepared({"max_new_tokens": 4, "num_beams": value})[1] for value in (1, True, 1.0, 1)] == [1, 1, 1, 0]
    monkeypatch.setattr(target.generation_config, "temperature", 0.25)
    found, calls = prepared({"max_new_tokens": 4, "do_sample": True})
    assert calls == 1 and found.processors[0].temperature == 0.25
    monkeypatch.setattr(target.generation_config, "temperature", 0.75)
    found, calls = prepared({"max_new_tokens": 4, "do_sample": True})
    assert calls == 1 and found.processors[0].temperature == 0.75


def test_configs_of_other_classes(target: PreTrainedModel) -> None:
    class Warm(GenerationConfig):
        def update(self, *args: Any, **options: Any) -> Any:
            unused = super().update(*args, **options)
            self.temperature = 2.0
            return unused

    preparations = Preparations(target)
    options = {"max_new_tokens": 4, "do_sample": True}
    for kind, temperature in ((GenerationConfig, 0.5), (Warm, 2.0), (GenerationConfig, 0.5)):
        prepared = preparations.prepare([5], kind(temperature=0.5), options, run=1)
        assert prepared.processors[0].temperature == temperature


def test_seeds_with_prepared_options(target: PreTrainedModel) -> None:
    """With processors that hold tensors, a text with a seed is the same alone and among others."""
    draft = noisy_copy(target, 0.05)
    options = {"do_sample": True, "seed": 3, "max_new_tokens": 12, "eta_cutoff": 0.3, "top_k": 0, "temperature": 1.5}
    call = {"assistant_model": draft, "continuous_batching_config": limits(max_batch_tokens=256), **options}
    together = [output.generated_tokens for output in target.generate_batch(ragged_prompts(), **call).values()]
    for prompt, text in zip(ragged_prompts(), together, strict=True):
        (alone,) = target.generate_batch([prompt], **call).values()
        assert alone.generated_tokens == text


def test_plans_of_prepared_options(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, default_trees: None
) -> None:
    """A call is checked again for other options, a tree or seed of the request's own, and in another run."""
    calls = 0
    check_call = request_plans.check_call

    def counted(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        check_call(*args, **options)

    monkeypatch.setattr(request_plans, "check_call", counted)
    draft, own_tree = noisy_copy(target, 0.05), hf_specdec.TokenTree.chain(3)
    manager = target.init_continuous_batching(assistant_model=draft, continuous_batching_config=limits())
    greedy, sampled = {"max_new_tokens": 9}, {"max_new_tokens": 9, "do_sample": True}

    def plan(options: dict[str, Any], run: Any = 1, **own: Any) -> tuple[Any, int]:
        before = calls
        return manager._admission.request("a", [5, 6], options, run=run, **own).options.plan, calls - before

    expected = {name: plan(options, run=None)[0] for name, options in (("greedy", greedy), ("sampled", sampled))}
    assert expected["greedy"] != expected["sampled"]
    assert [plan(greedy)[1] for _ in range(3)] == [1, 0, 0]
    assert [plan(sampled)[1] for _ in range(3)] == [1, 0, 0]
    assert plan(greedy) == (expected["greedy"], 0) and plan(sampled) == (expected["sampled"], 0)
    found, checks = plan(greedy, tree=own_tree)
    assert found.tree == own_tree and checks == 1
    found, checks = plan(sampled, seed=3)
    assert not found.draws_children and expected["sampled"].draws_children and checks == 1
    assert plan(greedy) == (expected["greedy"], 0) and plan(sampled) == (expected["sampled"], 0)
    assert plan(greedy, run=2) == (expected["greedy"], 1)
    with pytest.raises(ValueError, match="num_beams"):
        plan(greedy | {"num_beams": 2})


def test_not_too_many_are_kept(target: PreTrainedModel) -> None:
    counted = Counted(target)
    preparations = Preparations(counted)
    preparations.MOST = 3
    for number in (4, 5, 6, 4, 7, 4, 5):
        preparations.prepare([5], None, {"max_new_tokens": number}, run=1)
    assert counted.calls == 5  # 4 was used more recently than 5


@pytest.mark.parametrize("options", SHARED, ids=lambda options: str(list(options)[-1]))
@pytest.mark.some_cases(2)
def test_requests_with_prepared_options_share_steps(target: PreTrainedModel, options: dict[str, Any]) -> None:
    """Every row is processed, whatever its processors hold: many requests of one step write what they would alone."""
    draft, prompts = noisy_copy(target, 0.05), ragged_prompts()
    options = {name: value for name, value in options.items() if name not in ("do_sample", "temperature", "top_k")}
    options |= {"do_sample": False, "max_new_tokens": 12, "suppress_tokens": [*range(40)][:16]}
    expected = [text_alone(target, prompt, **options) for prompt in prompts]
    outputs = target.generate_batch(
        prompts, assistant_model=draft, continuous_batching_config=limits(max_batch_tokens=256), **options
    )
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert all(min(text) >= 16 for text in expected)


def test_requests_and_batches(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of many lengths with the same options end where they would alone; `generate` runs once for all."""
    draft, texts = noisy_copy(target, 0.05), ragged_prompts()
    expected = [text_alone(target, prompt, max_new_tokens=12) for prompt in texts]
    options = {"do_sample": False, "max_new_tokens": 12}
    calls = 0
    generate = type(target).generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return generate(*args, **kwargs)

    monkeypatch.setattr(type(target), "generate", counted)
    call = {"assistant_model": draft, "continuous_batching_config": limits()}
    outputs = target.generate_batch(texts, **options, **call)
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert calls <= 2  # one of them checks the call's defaults
    calls = 0
    with target.init_continuous_batching(**call) as manager:
        with manager.pause():
            pass  # now the thread runs
        while manager.is_running() and manager._admission.present_run() is None:
            time.sleep(0.01)
        names = [manager.add_request(prompt, **options) for prompt in texts]
        assert [manager.get_result(name).generated_tokens for name in names] == expected
        assert calls <= 2
        with manager.pause():
            pass  # the models may be changed here
        manager.get_result(manager.add_request(texts[0], **options))
        assert calls == 3
