"""Requests of one manager: options of their own, results as they come, and faults that stay with the one at fault."""

from __future__ import annotations

import copy
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone
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
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria
from transformers.utils import logging as transformers_logging

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.batching import SpeculativeBatchingManager, preparing
from hf_specdec.generation.stopping import TokenCriterion


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]"
PROMPTS = ragged_prompts((9, 14, 5, 21))


def make(model: PreTrainedModel, draft: Any, **options: Any) -> SpeculativeBatchingManager:
    options = {"tree": TREE, "continuous_batching_config": limits()} | options
    return model.init_continuous_batching(assistant_model=draft, **options)


@pytest.fixture
def manager(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[SpeculativeBatchingManager]:
    with make(target, draft) as manager:
        yield manager
    assert_nothing_left(manager)


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


# ------------------------------------------------------------------------------------------------------- their options


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
        assert len(manager._requests_of_nobody(2, do_sample=True)) == 2
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
    manager = make(target, draft, continuous_batching_config=limits(max_requests_per_batch=1))
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

    monkeypatch.setattr(preparing, "StopStringCriteria", Counted)
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
    with make(model, draft) as manager:
        assert deepest_draft(manager, generation_config=copy.deepcopy(model.generation_config)) == 3


def test_one_budget_of_nodes_for_a_step(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Four requests with six nodes each would take 24; they share 8."""
    config = SpeculativeConfig(tree=TREE, max_step_nodes=8)
    widths = []
    with make(target, draft, tree=None, speculative_config=config) as manager:
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


# ---------------------------------------------------------------------------------------------------------- their ends


def test_cancelling(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """While running, while being read, while waiting, before the start, and when there is nothing to cancel."""
    manager = make(target, draft, continuous_batching_config=limits(60, max_requests_per_batch=2))
    prompts = ragged_prompts((5, 60, 9, 11, 7))
    names = manager.add_requests(prompts, max_new_tokens=120, do_sample=False)
    manager.cancel_request(names[4])
    manager.cancel_request("nobody")
    with manager:
        assert manager.get_result(names[4]).error == "cancelled"
        manager.cancel_request(names[2])
        result = manager.get_result(names[2])
        assert (result.error, result.status) == ("cancelled", RequestStatus.FAILED)
        manager.cancel_request(names[0])
        manager.cancel_request(names[1])
        for number in (0, 1):
            result = manager.get_result(names[number])
            alone = text_alone(target, prompts[number], max_new_tokens=120)
            assert result.error in ("cancelled", None)
            assert result.generated_tokens == alone[: len(result.generated_tokens)]
        assert manager.get_result(names[3]).generated_tokens == text_alone(target, prompts[3], max_new_tokens=120)
        manager.cancel_request(names[3])
    assert_nothing_left(manager)


class Raises(LogitsProcessor):
    """Fails at its third call, or makes nothing but NaN or nothing at all possible."""

    def __init__(self, how: str):
        self.how, self.calls = how, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls < 3:
            return scores
        if self.how == "raises":
            raise KeyError("a fault of its own")
        return torch.full_like(scores, torch.nan if self.how == "nan" else -torch.inf)


@pytest.mark.parametrize("how", ["raises", "nan", "nothing"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_fault_in_a_processor_is_its_requests_own(
    manager: SpeculativeBatchingManager, target: PreTrainedModel, how: str, do_sample: bool
) -> None:
    bad = manager.add_request(
        PROMPTS[0], max_new_tokens=20, do_sample=do_sample, logits_processor=LogitsProcessorList([Raises(how)])
    )
    names = [manager.add_request(prompt, max_new_tokens=20, do_sample=False) for prompt in PROMPTS]
    result = manager.get_result(bad)
    if how == "raises" or do_sample:
        assert result.status == RequestStatus.FAILED and len(result.generated_tokens) == 2
        assert ("a fault of its own" if how == "raises" else "nothing to choose from") in result.error
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert manager.get_result(name).generated_tokens == text_alone(target, prompt, max_new_tokens=20)


def test_a_fault_in_a_criterion_is_its_requests_own(
    manager: SpeculativeBatchingManager, target: PreTrainedModel
) -> None:
    class Fails(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == len(PROMPTS[0]) + 6:
                raise ZeroDivisionError("no more")
            return torch.zeros(1, dtype=torch.bool)

    bad = manager.add_request(
        PROMPTS[0], max_new_tokens=20, do_sample=False, stopping_criteria=StoppingCriteriaList([Fails()])
    )
    name = manager.add_request(PROMPTS[1], max_new_tokens=20, do_sample=False)
    assert "ZeroDivisionError: no more" in manager.get_result(bad).error
    assert manager.get_result(name).generated_tokens == text_alone(target, PROMPTS[1], max_new_tokens=20)


class Spoils(LogitsProcessor):
    """From the fifth token on, all scores are `value`."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] < len(PROMPTS[0]) + 4 else torch.full_like(scores, self.value)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_scores_with_nothing_to_choose(
    manager: SpeculativeBatchingManager, target: PreTrainedModel, value: float, do_sample: bool
) -> None:
    bad = manager.add_request(
        PROMPTS[0], max_new_tokens=20, do_sample=do_sample, logits_processor=[Spoils(value)], seed=5
    )
    name = manager.add_request(PROMPTS[1], max_new_tokens=20, do_sample=False)
    result = manager.get_result(bad)
    assert result.error.startswith("There is nothing to choose from") and len(result.generated_tokens) == 4
    assert manager.get_result(name).generated_tokens == text_alone(target, PROMPTS[1], max_new_tokens=20)


def test_scores_that_are_infinite(manager: SpeculativeBatchingManager) -> None:
    """A greedy token with the score inf is the best one."""

    class Wants(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.tensor([7]), math.inf)

    name = manager.add_request(PROMPTS[0], max_new_tokens=5, do_sample=False, logits_processor=[Wants()])
    assert manager.get_result(name).generated_tokens == [7] * 5


@pytest.mark.parametrize("assistant", ["draft", "ngram"])
def test_logits_that_are_not_numbers(target: PreTrainedModel, assistant: str) -> None:
    """A token whose embedding is NaN poisons the K/V of its request; whoever gets those blocks next is unharmed."""
    target = copy.deepcopy(target)
    draft = copy.deepcopy(target) if assistant == "draft" else NgramDraft()
    texts = [text_alone(target, prompt, max_new_tokens=24) for prompt in PROMPTS]
    poisoned = min(set(range(61)) - {token for tokens in PROMPTS + texts for token in tokens})
    with torch.no_grad():
        target.get_input_embeddings().weight[poisoned] = torch.nan
    with make(target, draft, tree="[(0,), (0, 0)]", continuous_batching_config=limits(40)) as manager:
        for _ in range(3):
            bad = manager.add_request([5, 7, poisoned, 9, 11, 4], max_new_tokens=24, do_sample=False)
            names = manager.add_requests(PROMPTS, max_new_tokens=24, do_sample=False)
            assert "not numbers" in manager.get_result(bad).error
            assert [manager.get_result(name).generated_tokens for name in names] == texts
    assert_nothing_left(manager)


class Breaks(NgramDraft):
    """A user's drafter, which has probabilities that nobody asks for, and fails on texts that hold a token."""

    def propose(self, sequences: Any) -> Any:
        if sequences.lengths[0] > 25 and 60 in sequences.tokens(0, 0):
            raise OverflowError("of its own")
        return super().propose(sequences)


def test_a_fault_in_a_users_drafter_is_its_requests_own(target: PreTrainedModel) -> None:
    with make(target, Breaks()) as manager:
        bad = manager.add_request([60, *PROMPTS[0]], max_new_tokens=30, do_sample=False)
        names = [manager.add_request([5, *prompt[:8]], max_new_tokens=30, do_sample=False) for prompt in PROMPTS]
        result = manager.get_result(bad)
        assert "OverflowError: of its own" in result.error and len(result.generated_tokens) >= 16
        for name, prompt in zip(names, PROMPTS, strict=True):
            text = text_alone(target, [5, *prompt[:8]], max_new_tokens=30)
            result = manager.get_result(name)
            assert result.generated_tokens == text or (60 in text and result.error is not None)
    assert_nothing_left(manager)


def test_ctrl_c(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Ends the requests and the thread, and leaves the model as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            target.generate_batch(PROMPTS, assistant_model=draft, tree=TREE, max_new_tokens=50_000, do_sample=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "hf-specdec-manager"]
    assert target.config._attn_implementation == "sdpa"


def test_stopping_at_once(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    manager = make(target, draft)
    manager.start()
    names = manager.add_requests(PROMPTS, max_new_tokens=400, do_sample=False)
    manager.stop(hard_stop=True)
    assert not manager.is_running()
    assert all("was stopped before" in manager.get_result(name).error for name in names)
    assert manager.get_result() is None
    assert_nothing_left(manager)
    with manager:  # and can be used again
        name = manager.add_request(PROMPTS[0], max_new_tokens=8, do_sample=False)
        assert manager.get_result(name).generated_tokens == text_alone(target, PROMPTS[0], max_new_tokens=8)
    assert target.config._attn_implementation == "sdpa"


def test_an_error_of_the_model_ends_the_manager_with_it(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("out of it")

    manager = make(target, draft)
    name = manager.add_request(PROMPTS[0], max_new_tokens=8)
    with target.register_forward_pre_hook(fail):
        manager.start()
        assert "out of it" in manager.get_result(name).error
        manager.join()
    assert isinstance(manager.background_thread_status.fatal_error, MemoryError)
    with pytest.raises(RuntimeError, match="ended with an error"):
        manager.add_request(PROMPTS[0])
    with target.register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="out of it"):
        target.generate_batch(PROMPTS, assistant_model=draft, tree=TREE)
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "places, options", [(2, {"max_requests_per_batch": 2}), (4, {"num_blocks": 8})], ids=["places", "blocks"]
)
def test_a_full_queue(target: PreTrainedModel, draft: PreTrainedModel, places: int, options: dict[str, int]) -> None:
    """Those wait for which there is no place, or are no blocks."""
    manager = make(target, draft, continuous_batching_config=limits(max_queue_size=3, **options))
    for _ in range(places + 3):
        manager.add_request([4, 5, 6], max_new_tokens=5)
    with pytest.raises(queue.Full, match="`max_queue_size=3`: 3 requests are waiting, and 1 would come"):
        manager.add_request([4, 5, 6], max_new_tokens=5)
    manager.start()
    manager.stop()
    assert_nothing_left(manager)


def test_several_at_once_and_the_queue(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    config = limits(max_queue_size=3, max_requests_per_batch=2)
    manager = make(target, draft, continuous_batching_config=config)
    with pytest.raises(queue.Full, match="0 requests are waiting, and 6 would come"):
        manager.add_requests([[4, 5, 6]] * 6, max_new_tokens=5)
    assert len(manager.add_requests([[4, 5, 6]] * 5, max_new_tokens=5)) == 5
    manager.destroy()


def test_a_burst_finds_the_places_that_are_free(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    with make(target, draft, continuous_batching_config=limits(max_queue_size=1)) as manager:
        for name in [manager.add_request([4, 5, 6], max_new_tokens=5) for _ in range(30)]:
            assert manager.get_result(name).error is None


def test_generate_meanwhile(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    """Others may use the model while requests run."""
    expected = text_alone(target, PROMPTS[3], max_new_tokens=20)
    names = manager.add_requests(PROMPTS * 6, max_new_tokens=60, do_sample=False)
    assert all(text_alone(target, PROMPTS[3], max_new_tokens=20) == expected for _ in range(5))
    for name, prompt in zip(names, PROMPTS * 6, strict=True):
        assert manager.get_result(name).generated_tokens == text_alone(target, prompt, max_new_tokens=60)


def test_requests_from_many_threads(manager: SpeculativeBatchingManager, target: PreTrainedModel) -> None:
    expected = {number: text_alone(target, prompt, max_new_tokens=15) for number, prompt in enumerate(PROMPTS)}
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(6):
            name = manager.add_request(PROMPTS[number % 4], max_new_tokens=15, do_sample=False)
            if turn % 3 == 2:
                time.sleep(0.01)
            result = manager.get_result(name, timeout=60)
            if result is None or result.generated_tokens != expected[number % 4]:
                wrong.append((name, result))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_first_token_is_told_before_the_others_go_on(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """From the forward that ends a prompt, and not from the next."""
    manager = target.init_continuous_batching(
        assistant_model=draft, tree="[(0,)]", continuous_batching_config=limits(max_batch_tokens=8)
    )
    forwards: list[int] = []
    handle = target.register_forward_hook(lambda module, args, output: forwards.append(output.logits.shape[1]))
    try:
        for prompt in (PROMPTS[0][:8], PROMPTS[0][:3]):  # the second is read beside the first, which runs
            manager.add_request(prompt, max_new_tokens=20, do_sample=False)
        manager._loop._take_in()
        seen = []
        with manager.engine.running():
            for _ in range(2):
                seen += [
                    (request.request_id, request.length - len(request.prompt), len(forwards))
                    for requests in manager.engine.step()
                    for request in requests
                ]
    finally:
        handle.remove()
    first, second = "req_0", "req_1"
    assert seen[0] == (first, 1, 1)  # alone in the first forward
    assert [event[0] for event in seen] == [first, first, second, first, second]
    assert seen[2] == (second, 1, 3) and seen[3][2] == 4
    assert len(forwards) == 4


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
