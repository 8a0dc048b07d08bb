"""Timed calls, in turn."""

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
    One `generate` call.

    Args:
        contender (`str`), task (`str`), prompt (`int`), round (`int`): what was called, with which prompt, and when.
        tokens (`list[int]`): the new tokens.
        seconds (`float`): of the whole call, prefill included.
        metrics (`SpeculationMetrics`, *optional*): if it was ours.
    """

    contender: str
    task: str
    prompt: int
    round: int
    tokens: list[int]
    seconds: float
    metrics: SpeculationMetrics | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of this call alone."""
        return len(self.tokens) / self.seconds


def generate(
    model: PreTrainedModel, contender: Contender, prompt: EncodedPrompt, **options: Any
) -> tuple[list[int], float]:
    """The new tokens of one call, and its seconds. They are on the host at the end, so that the device is done."""
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
    Times every contender with every prompt, in turn: each round begins with another contender. Before, each is warmed
    up with the longest prompt, which is the one that static caches grow to.

    Args:
        temperature (`float`): 0: greedy.
        seed (`int`): of the random numbers; every call of a round has its own.
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
                    )
                )
                advance()
    return calls


def num_calls(num_prompts: int, contenders: Sequence[Contender], rounds: int) -> int:
    """How many calls `compare` makes."""
    return sum(contender.warm_up_calls + rounds * num_prompts for contender in contenders)


def synchronize(device: torch.device) -> None:
    """Waits for the accelerator, if it is one."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
