"""Faults of one request: the others of the manager go on."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.batches import REQUEST_TREE, assert_nothing_left, limits, manager_of, ragged_prompts, text_alone
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_specdec import NgramDraft
from hf_specdec.batching import SpeculativeBatchingManager


PROMPTS = ragged_prompts((9, 14, 5, 21))


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
@pytest.mark.some_cases(3)
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
@pytest.mark.some_cases(1)
def test_logits_that_are_not_numbers(target: PreTrainedModel, assistant: str) -> None:
    """A token whose embedding is NaN poisons the K/V of its request; whoever gets those blocks next is unharmed."""
    target = copy.deepcopy(target)
    draft = copy.deepcopy(target) if assistant == "draft" else NgramDraft()
    texts = [text_alone(target, prompt, max_new_tokens=24) for prompt in PROMPTS]
    poisoned = min(set(range(61)) - {token for tokens in PROMPTS + texts for token in tokens})
    with torch.no_grad():
        target.get_input_embeddings().weight[poisoned] = torch.nan
    with manager_of(target, draft, tree="[(0,), (0, 0)]", continuous_batching_config=limits(40)) as manager:
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
    with manager_of(target, Breaks()) as manager:
        bad = manager.add_request([60, *PROMPTS[0]], max_new_tokens=30, do_sample=False)
        names = [manager.add_request([5, *prompt[:8]], max_new_tokens=30, do_sample=False) for prompt in PROMPTS]
        result = manager.get_result(bad)
        assert "OverflowError: of its own" in result.error and len(result.generated_tokens) >= 16
        for name, prompt in zip(names, PROMPTS, strict=True):
            text = text_alone(target, [5, *prompt[:8]], max_new_tokens=30)
            result = manager.get_result(name)
            assert result.generated_tokens == text or (60 in text and result.error is not None)
    assert_nothing_left(manager)


def test_an_error_of_the_model_ends_the_manager_with_it(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("out of it")

    manager = manager_of(target, draft)
    name = manager.add_request(PROMPTS[0], max_new_tokens=8)
    with target.register_forward_pre_hook(fail):
        manager.start()
        assert "out of it" in manager.get_result(name).error
        manager.join()
    assert isinstance(manager.background_thread_status.fatal_error, MemoryError)
    with pytest.raises(RuntimeError, match="ended with an error"):
        manager.add_request(PROMPTS[0])
    with target.register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="out of it"):
        target.generate_batch(PROMPTS, assistant_model=draft, tree=REQUEST_TREE)
    assert target.config._attn_implementation == "sdpa"
