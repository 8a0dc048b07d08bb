"""Requests of many lengths, beside `generate` with each of them alone."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from hf_specdec.batching import SpeculativeBatchingManager, SpeculativeGenerationOutput
from hf_specdec.engine.captured import Outcome, StepRunner
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.engine import Engine
from hf_specdec.engine.request import Request

from .goldens import trained_prompts, trained_target
from .models import prompts
from .plain import greedy_text


REQUEST_TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]"
BLOCK_SIZE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
"""The option's name in the installed transformers."""
LENGTHS = (9, 1, 30, 2, 17, 41, 5, 12, 26, 3)
"""From a single token to several blocks and chunks; past the sliding windows of the tiny models."""


def ragged_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random prompts of these lengths."""
    return [prompts(1, length, seed=number)["input_ids"][0].tolist() for number, length in enumerate(lengths)]


def limits(num_blocks: int = 200, block_size: int = 4, **options: Any) -> ContinuousBatchingConfig:
    """A config with small blocks, under the names of the installed transformers; chunks of 16 prompt tokens."""
    options = {"max_batch_tokens": 16} | options
    return ContinuousBatchingConfig(num_blocks=num_blocks, **{BLOCK_SIZE: block_size}, **options)


def manager_of(model: PreTrainedModel, draft: Any, **options: Any) -> SpeculativeBatchingManager:
    """A manager with `REQUEST_TREE` and small limits, if `options` name no others."""
    options = {"tree": REQUEST_TREE, "continuous_batching_config": limits()} | options
    return model.init_continuous_batching(assistant_model=draft, **options)


@contextmanager
def equal_options_once(manager: SpeculativeBatchingManager) -> Iterator[None]:
    """Prepares equal options of the requests that are added inside once, as a running engine does."""
    of_engine, manager._admission.present_run = manager._admission.present_run, lambda: -1
    yield
    manager._admission.present_run = of_engine


def text_alone(model: PreTrainedModel, prompt: list[int], anew: bool = False, **options: Any) -> list[int]:
    """
    What plain greedy `generate` writes after one prompt; of the shared target its golden, where there is one. In a
    call that is made `anew`, where it is such a call that is tested.
    """
    if model is trained_target() and options.keys() == {"max_new_tokens"}:
        goldens = trained_prompts()
        if prompt in goldens["prompts"] and options["max_new_tokens"] <= 64:
            return goldens["greedy_64"][goldens["prompts"].index(prompt)][: options["max_new_tokens"]]
    ids = torch.tensor([prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    text = model.generate(**inputs, do_sample=False, **options) if anew else greedy_text(model, inputs, **options)
    return text[0, len(prompt) :].tolist()


def steps_to_the_end(engine: Engine) -> Iterator[list[Request]]:
    """Runs all steps of an engine's requests, as a manager's loop does. Yields those that have ended in each step."""
    while engine.scheduler.has_work:
        ended = []
        for told in engine.step():
            for request in told:
                if request.is_over:
                    engine.end(request)
                    ended.append(request)
        yield ended


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits until something holds, which another thread sees to."""
    end = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def run_together(manager: SpeculativeBatchingManager, requests: list[Request]) -> list[list[int]]:
    """The texts of requests that come together, without their prompts."""
    engine = manager.engine
    with engine.running():
        for request in requests:
            engine.scheduler.add(request)
        for _ in steps_to_the_end(engine):
            pass
    assert not any(request.error for request in requests)
    return [request.tokens[len(request.prompt) :] for request in requests]


def run_with_ends(
    manager: SpeculativeBatchingManager, requests: list[Request], choice: random.Random
) -> Iterator[None]:
    """Runs requests that come and are cancelled at random times; yields after every step."""
    engine, left = manager.engine, list(requests)
    with engine.running():
        while left or engine.scheduler.has_work:
            for request in [left.pop(0) for _ in range(min(len(left), choice.randrange(4)))]:
                engine.scheduler.add(request)
            for told in engine.step():
                for request in told:
                    if request.is_over:
                        engine.end(request)
            if engine.scheduler.active and choice.random() < 0.15:
                victim = choice.choice([*engine.scheduler.active, *engine.scheduler.waiting])
                victim.fail("cancelled")
                engine.end(victim)
            yield


def assert_nothing_left(manager: SpeculativeBatchingManager) -> None:
    """Asserts that all blocks are free and nothing is known of any request."""
    state = manager.state
    assert (state.num_running, state.num_waiting) == (0, 0)
    assert state.num_free_blocks == state.num_blocks
    pool = manager.engine.pool
    assert sorted([*pool._free, *pool._idle]) == list(range(2, state.num_blocks + 2)) and not any(pool._num_users)
    assert not manager.engine.prefixes._reading and not manager.engine.prefixes._readers
    for cache in (manager.engine.target.cache, manager.engine.drafting.cache):
        assert cache is None or not (cache._lengths_of or cache._cleaned)


def accepted(output: SpeculativeGenerationOutput) -> int:
    """Draft tokens that a request accepted."""
    return output.speculation.num_accepted_tokens


def runs_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[InFlightStep]:
    """A list to which every whole step that runs from now on is added."""
    found: list[InFlightStep] = []
    launch = InFlightStep.launch

    def counted(self: InFlightStep) -> Any:
        found.append(self)
        return launch(self)

    monkeypatch.setattr(InFlightStep, "launch", counted)
    return found


def noted_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Outcome]]:
    """The outcomes of every call of `StepRunner.run` from now on."""
    calls: list[list[Outcome]] = []
    run = StepRunner.run

    def noted(self: StepRunner, *args: Any) -> Iterator[Outcome]:
        outcomes: list[Outcome] = []
        calls.append(outcomes)
        for outcome in run(self, *args):
            outcomes.append(outcome)
            yield outcome

    monkeypatch.setattr(StepRunner, "run", noted)
    return calls
