"""Requests of one manager with options of their own, and wrong ones."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import pytest
import torch
from support.batches import REQUEST_TREE, limits, manager_of, ragged_prompts, text_alone
from support.calls import RecordingProcessor
from support.exact import FrequencyPenalty
from support.tokenizer import tiny_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria
from transformers.utils import logging as transformers_logging

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.batching import SpeculativeBatchingManager, stop_strings
from hf_specdec.engine.stopping import TokenCriterion


PROMPTS = ragged_prompts((9, 14, 5, 21))


class StopAfter(StoppingCriteria):
    """Stops after so many tokens, and keeps what it was shown."""

    def __init__(self, length: int):
        self.length, self.seen = length, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Counting(LogitsProcessor):
    """Has a state: prefers another token at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (7 * self.calls) % scores.shape[1]] += 2.0
        return scores


def test_every_request_has_its_own_options(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    end = text_alone(target, PROMPTS[1], max_new_tokens=20)[8]
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 7},
        {"max_new_tokens": 30, "eos_token_id": end},
        {"max_new_tokens": 30, "repetition_penalty": 1.5},
        {"max_new_tokens": 30, "min_new_tokens": 25, "eos_token_id": [end, 4]},
        {"max_new_tokens": 30, "no_repeat_ngram_size": 2, "bad_words_ids": [[9], [12, 14]]},
        {},
    ]
    names = [manager.add_request(prompt, do_sample=False, **own) for own in options for prompt in PROMPTS]
    expected = [text_alone(target, prompt, **own) for own in options for prompt in PROMPTS]
    assert [manager.get_result(name).generated_tokens for name in names] == expected
    assert len({len(text) for text in expected}) > 3


def test_processors_and_criteria_get_the_calls_of_generate(
    manager: SpeculativeBatchingManager, target: PreTrainedModel
) -> None:
    """Objects with state, too: what they see is what plain `generate` with this prompt alone would show them."""
    mine, theirs = [], []
    for calls in (mine, theirs):
        for prompt in PROMPTS:
            recorder, criterion = RecordingProcessor(), StopAfter(len(prompt) + 17)
            processors = LogitsProcessorList([Counting(), FrequencyPenalty(0.7), recorder])
            calls.append((prompt, recorder, criterion, processors))
    options = {"max_new_tokens": 30, "do_sample": False}
    names = [
        manager.add_request(
            prompt, logits_processor=processors, stopping_criteria=StoppingCriteriaList([criterion]), **options
        )
        for prompt, _, criterion, processors in mine
    ]
    for name, (_, recorder, criterion, _), (prompt, other, its, processors) in zip(names, mine, theirs, strict=True):
        expected = text_alone(
            target, prompt, logits_processor=processors, stopping_criteria=StoppingCriteriaList([its]), **options
        )
        assert manager.get_result(name).generated_tokens == expected
        recorder.assert_saw_the_same(other)
        assert criterion.seen == its.seen
    assert manager.state.speculation.num_accepted_tokens > 0


def test_stop_strings(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizer()
    text = text_alone(target, PROMPTS[0], max_new_tokens=20)
    options = {"stop_strings": [tokenizer.decode([text[6]])], "tokenizer": tokenizer, "max_new_tokens": 20}
    name = manager.add_request(PROMPTS[0], do_sample=False, **options)
    assert manager.get_result(name).generated_tokens == text_alone(target, PROMPTS[0], **options)


def test_no_stop_strings(
    manager: SpeculativeBatchingManager, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty list is none, and those of the model's own config end nothing where others are given."""
    tokenizer, text = tiny_tokenizer(), text_alone(target, PROMPTS[0], max_new_tokens=20)
    first, second = (tokenizer.decode([token]) for token in text[:2])
    monkeypatch.setattr(target.generation_config, "stop_strings", [first])
    options = {"tokenizer": tokenizer, "max_new_tokens": 20, "do_sample": False}
    names = [manager.add_request(PROMPTS[0], stop_strings=stop, **options) for stop in ([], [second])]
    found = [manager.get_result(name).generated_tokens for name in names]
    assert first != second and found == [text, text[:2]]


def test_stop_strings_of_the_model(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager and a warm-up need no tokenizer; requests bring it along."""
    tokenizer, text = tiny_tokenizer(), text_alone(target, PROMPTS[0], max_new_tokens=20)
    monkeypatch.setattr(target.generation_config, "stop_strings", [tokenizer.decode([text[6]])])
    options = {"tokenizer": tokenizer, "max_new_tokens": 20, "do_sample": False}
    with target.init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits()
    ) as manager:
        assert len(manager._admission.dummy_requests(2, do_sample=True)) == 2
        name = manager.add_request(PROMPTS[0], **options)
        assert manager.get_result(name).generated_tokens == text_alone(target, PROMPTS[0], **options)
        with pytest.raises(ValueError, match="tokenizer"):
            manager.add_request(PROMPTS[0], max_new_tokens=20)


class TimePasses(StoppingCriteria):
    """An hour passes with the token that makes the text so long."""

    def __init__(self, length: int, hours: list[int]):
        self.length, self.hours = length, hours

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.hours[0] += input_ids.shape[1] == self.length
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_max_time_while_waiting(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from the admission on, as in `generate` from the call; a caller's criterion from when it is made."""
    hours, now = [0], time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours[0])
    options = {"max_new_tokens": 20, "do_sample": False}
    manager = manager_of(target, draft, continuous_batching_config=limits(max_requests_per_batch=1))
    passing = StoppingCriteriaList([TimePasses(len(PROMPTS[0]) + 5, hours)])
    names = [
        manager.add_request(PROMPTS[0], max_time=1800.0, stopping_criteria=passing, **options),
        manager.add_request(PROMPTS[1], max_time=1800.0, **options),
        manager.add_request(PROMPTS[2], generation_config=GenerationConfig(max_time=1800.0), **options),
        manager.add_request(PROMPTS[3], stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(1800.0)]), **options),
    ]
    with manager:
        results = [manager.get_result(name) for name in names]
    assert [len(result.generated_tokens) for result in results] == [6, 20, 20, 1]
    assert [result.finish_reason for result in results] == ["stop", "length", "length", "stop"]


class EndsWith(TokenCriterion):
    def __init__(self, token: int):
        self.token, self.seen = token, []

    def ends_with(self, token: int) -> bool:
        self.seen.append(token)
        return token == self.token


def test_criteria_that_are_told_tokens(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    text = text_alone(target, PROMPTS[0], max_new_tokens=20)
    criterion = EndsWith(text[9])
    name = manager.add_request(
        PROMPTS[0], max_new_tokens=20, do_sample=False, stopping_criteria=StoppingCriteriaList([criterion])
    )
    assert manager.get_result(name).generated_tokens == criterion.seen == text[: text.index(text[9]) + 1]


def test_stop_strings_are_looked_up_in_the_vocabulary_once(
    manager: SpeculativeBatchingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tokenizer = [], tiny_tokenizer()

    class Counted(StopStringCriteria):
        def __init__(self, *args: Any) -> None:
            made.append(args[1])
            super().__init__(*args)

    monkeypatch.setattr(stop_strings, "StopStringCriteria", Counted)
    texts = {}
    for stop in ("a", ["a"], ["b", "cc"], "a"):
        name = manager.add_request(
            PROMPTS[0], max_new_tokens=30, stop_strings=stop, tokenizer=tokenizer, do_sample=False
        )
        texts.setdefault(str(stop), []).append(manager.get_result(name).generated_tokens)
    assert made == [["a"], ["b", "cc"]]
    assert texts["a"][0] == texts["a"][1] == texts["['a']"][0]
    assert "a" in tokenizer.decode(texts["a"][0]) or len(texts["a"][0]) == 30


def test_trees_and_requests_without(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    trees: list[Any] = [None, "[(0,)]", "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]", "auto"]
    names = [manager.add_request(PROMPTS[0], max_new_tokens=30, do_sample=False, tree=tree) for tree in trees]
    alone = manager.add_request(PROMPTS[0], max_new_tokens=30, do_sample=False, speculate=False)
    expected = text_alone(target, PROMPTS[0], max_new_tokens=30)
    deepest = []
    for name in names:
        result = manager.get_result(name)
        assert result.generated_tokens == expected
        deepest.append(len(result.speculation.num_accepted_per_position))
    assert deepest[:3] == [3, 1, 4]
    result = manager.get_result(alone)
    assert result.generated_tokens == expected and result.speculation.num_drafts == 0
    assert result.speculation.accepted_per_step == [[0] * 29]  # the first token is the prefill's


def deepest_draft(manager: SpeculativeBatchingManager, **options: Any) -> int:
    """Levels of the trees with which a request was drafted."""
    name = manager.add_request(PROMPTS[0], max_new_tokens=30, do_sample=False, **options)
    return len(manager.get_result(name).speculation.num_accepted_per_position)


def test_speculation_in_a_config_of_its_own(manager: SpeculativeBatchingManager) -> None:
    """A tree is taken, as by name, and nothing is dropped without a word."""
    config = GenerationConfig(tree="[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]")
    assert deepest_draft(manager, generation_config=config) == 4
    assert deepest_draft(manager, generation_config=config, tree="[(0,)]") == 1
    assert deepest_draft(manager, generation_config=GenerationConfig()) == 3
    with pytest.raises(ValueError, match="`tree` must be"):
        manager.add_request(PROMPTS[0], generation_config=GenerationConfig(tree="[0]"))
    own = SpeculativeConfig(tree="[(0,)]")
    for options in ({"speculative_config": own}, {"generation_config": GenerationConfig(speculative_config=own)}):
        with pytest.raises(ValueError, match="`speculative_config"):
            manager.add_request(PROMPTS[0], **options)


@pytest.mark.parametrize("option", [{"tree": "[(0,)]"}, {"speculative_config": {"tree": "[(0,)]"}}], ids=list)
def test_a_copy_of_the_models_config(target: PreTrainedModel, draft: PreTrainedModel, option: dict[str, Any]) -> None:
    """The speculation that it names is a default, which the manager's replaces."""
    model = copy.deepcopy(target)
    for name, value in option.items():
        setattr(model.generation_config, name, value)
    with manager_of(model, draft) as manager:
        assert deepest_draft(manager, generation_config=copy.deepcopy(model.generation_config)) == 3


def test_one_budget_of_nodes_for_a_step(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Four requests with six nodes each would take 24; they share 8."""
    config = SpeculativeConfig(tree=REQUEST_TREE, max_step_nodes=8)
    widths = []
    with manager_of(target, draft, tree=None, speculative_config=config) as manager:
        score = manager.engine.target.score
        manager.engine.target.score = lambda rows, tree: (
            widths.append((len(rows), tree.num_nodes)) or score(rows, tree)
        )
        names = manager.add_requests(PROMPTS, max_new_tokens=30, do_sample=False)
        texts = [manager.get_result(name).generated_tokens for name in names]
    assert texts == [text_alone(target, prompt, max_new_tokens=30) for prompt in PROMPTS]
    assert all(rows * nodes <= 8 for rows, nodes in widths) and (4, 2) in widths and (1, 6) in widths


def test_names(manager: SpeculativeBatchingManager) -> None:
    assert manager.add_request([5, 6], max_new_tokens=100, request_id="mine") == "mine"
    with pytest.raises(ValueError, match="`request_id='mine'` is running already"):
        manager.add_request([5, 6], request_id="mine")
    assert manager.get_result("yours", timeout=0.01) is None
    assert manager.get_result("mine").request_id == "mine"


@pytest.mark.parametrize(
    "option, value",
    [
        ("speculate", "no"),
        ("speculate", 0),
        ("request_id", 5),
        ("max_new_tokens", "3"),
        ("max_new_tokens", 2.5),
        ("eos_token_id", "a"),
    ],
)
def test_arguments_of_the_wrong_type(target: PreTrainedModel, draft: PreTrainedModel, option: str, value: Any) -> None:
    manager = target.init_continuous_batching(assistant_model=draft, tree="[(0,)]")
    with pytest.raises(TypeError, match=f"`{option}`.*{value!r}"):
        manager.add_request([5, 6], **{option: value})
    assert manager.state.num_waiting == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"generation_config": {"max_new_tokens": 3}}, "`generation_config` must be a GenerationConfig, but is dict"),
        ({"logits_processor": print}, "`logits_processor` must be a list"),
        ({"stopping_criteria": print}, "`stopping_criteria` must be a list"),
        ({"assistant_model": torch.nn.Linear(99, 99)}, "`assistant_model=Linear.*` is not known here"),
        ({"input_ids": [1.5, 2]}, "`input_ids`.*integers"),
        ({"input_ids": [1, -1]}, "`input_ids` must be tokens from 0 to"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_other_wrong_arguments(
    target: PreTrainedModel, draft: PreTrainedModel, options: dict[str, Any], message: str
) -> None:
    manager = target.init_continuous_batching(assistant_model=draft, tree="[(0,)]")
    with pytest.raises((ValueError, TypeError), match=message):
        manager.add_request(**{"input_ids": [5, 6]} | options)
    with pytest.raises(RuntimeError, match="`register_result_handler` is for coroutines"):
        manager.register_result_handler("one", print)


def test_a_config_beside_options_is_not_warned_of(
    target: PreTrainedModel, draft: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers warns of both in one call, which this library alone makes; and of options without effect."""
    target = copy.deepcopy(target)
    target.generation_config.do_sample = True
    transformers_logging.warning_once.cache_clear()  # type: ignore[attr-defined]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        manager = target.init_continuous_batching(assistant_model=draft, tree="[(0,)]")
        config = GenerationConfig(max_new_tokens=4)
        names = [
            manager.add_request(PROMPTS[0], generation_config=config, **options)
            for options in ({"do_sample": False}, {"temperature": 0.7}, {"top_p": 0.5, "max_new_tokens": 3})
        ]
        with manager:
            lengths = [len(manager.get_result(name).generated_tokens) for name in names]
    finally:
        logger.removeHandler(caplog.handler)
    assert lengths == [4, 4, 3] and config.temperature is None and config.max_new_tokens == 4
    assert "generation_config" not in caplog.text and "flags are not valid" not in caplog.text
