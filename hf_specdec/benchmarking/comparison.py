"""Timed `generate` calls of several contenders, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..metrics import SpeculationMetrics, last_metrics
from .contenders import Contender, sampling_options
from .prompts import EncodedPrompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """
    One timed `generate` call.

    Args:
        contender (`str`), task (`str`), prompt (`int`), round (`int`): contender, task, prompt number and round.
        question (`int`, *optional*): number of the question of which the prompt is a turn; None: one of its own.
        tokens (`list[int]`): the new tokens.
        seconds (`float`): time of the whole call, prefill included.
        metrics (`SpeculationMetrics`, *optional*): metrics of a call that speculated with this library.
    """

    contender: str
    task: str
    prompt: int
    round: int
    tokens: list[int]
    seconds: float
    metrics: SpeculationMetrics | None = None
    question: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of this call, prefill included."""
        return len(self.tokens) / self.seconds


def generate(
    model: PreTrainedModel, contender: Contender, prompt: EncodedPrompt, **options: Any
) -> tuple[list[int], float]:
    """The new tokens of one call, and its seconds; copying the tokens to the host waits for the device."""
    with contender.settings() as settings:
        synchronize(model.device)
        start = time.perf_counter()
        ids = model.generate(**prompt.inputs, **settings, **options)
        tokens = ids[0, prompt.length :].tolist()
        return tokens, time.perf_counter() - start


def compare(
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    contenders: Sequence[Contender],
    *,
    temperature: float,
    max_new_tokens: int,
    rounds: int,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[Call]:
    """
    Times every contender with every prompt, in turn; each round begins with another contender.

    Every contender is first warmed up with the longest prompt, because static caches grow to its length.

    Args:
        model (`PreTrainedModel`): the target.
        prompts (`Sequence[EncodedPrompt]`): the prompts.
        contenders (`Sequence[Contender]`): the contenders.
        temperature (`float`): temperature of all calls; 0 is greedy.
        max_new_tokens (`int`): most new tokens of every call.
        rounds (`int`): timed calls of each contender with each prompt.
        seed (`int`): first seed; every prompt of every round has its own seed.
        advance (`Callable`): called after every call, `num_calls` times.
    """
    options = sampling_options(temperature) | {"max_new_tokens": max_new_tokens}
    longest = max(prompts, key=lambda prompt: prompt.length)
    for contender in contenders:
        for _ in range(contender.warm_up_calls):
            torch.manual_seed(seed)
            generate(model, contender, longest, **options)
            advance()
    calls = []
    for round_number in range(rounds):
        first = round_number % len(contenders)
        for index, prompt in enumerate(prompts):
            for contender in (*contenders[first:], *contenders[:first]):
                torch.manual_seed(seed + round_number * len(prompts) + index)
                tokens, seconds = generate(model, contender, prompt, **options)
                calls.append(
                    Call(
                        contender=contender.name,
                        task=prompt.task,
                        prompt=index,
                        round=round_number,
                        tokens=tokens,
                        seconds=seconds,
                        metrics=last_metrics() if contender.is_ours else None,
                        question=prompt.question,
                    )
                )
                advance()
    return calls


def num_calls(num_prompts: int, contenders: Sequence[Contender], rounds: int) -> int:
    """Number of calls that `compare` makes, warm-up included."""
    return sum(contender.warm_up_calls + rounds * num_prompts for contender in contenders)


def synchronize(device: torch.device) -> None:
    """Waits for a device that is an accelerator; does nothing for a CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
