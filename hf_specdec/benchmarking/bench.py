"""`hf-specdec bench` without its command line: compare texts, time calls, count tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..cards import Measurement
from .comparison import compare, num_calls
from .contenders import OURS, Contender
from .equality import Difference, Gate, check, differences_of
from .figures import Figures, figures
from .phases import split_of_steps, trace_call
from .prompts import EncodedPrompt


REFERENCE = "generate"
"""Name of the contender that speed-ups are relative to."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """
    Parameters of a measurement.

    Args:
        temperatures (`Sequence[float]`): temperatures to measure at; 0 is greedy.
        max_new_tokens (`int`): most new tokens of every call.
        rounds (`int`): timed calls of each contender with each prompt.
        seed (`int`): seed of sampled calls.
    """

    temperatures: Sequence[float] = (0.0,)
    max_new_tokens: int = 128
    rounds: int = 3
    seed: int = 0


@dataclass(kw_only=True)
class Report:
    """
    Results of a benchmark.

    Args:
        setting (`dict`): target, draft, machine, versions, method.
        gate (`Gate`, *optional*): comparison of texts in float32; None if it was left out.
        figures (`list[Figures]`): figures of the timed calls; empty if the gate failed.
        differences (`list[Difference]`): first differences of greedy texts from plain ones, in the timed dtype.
    """

    setting: dict[str, Any]
    gate: Gate | None
    figures: list[Figures] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def no_ties(self) -> list[Difference]:
        """The `differences` that roundings do not explain."""
        return [difference for difference in self.differences if not difference.is_near_tie]

    @property
    def is_lossless(self) -> bool | None:
        """
        Whether this library's greedy texts are plain `generate`'s: all of the float32 comparison, and the timed ones
        but for near-ties. None if nothing is known to differ, but the float32 comparison was left out.
        """
        if any(difference.contender.startswith(OURS) for difference in self.no_ties):
            return False
        return None if self.gate is None else self.gate.is_passed

    def measurements(self, contender: str) -> list[Measurement]:
        """The figures of one contender, as `Measurement`s for a model card."""
        plain = {(f.task, f.temperature): f.tokens_per_second for f in self.figures if f.contender == REFERENCE}
        return [
            Measurement(
                dataset=found.task,
                tree=contender.removeprefix(OURS),
                mean_acceptance_length=found.mean_acceptance_length,
                acceptance_per_position=tuple(found.acceptance_per_position or ()),
                tokens_per_second=found.tokens_per_second,
                plain_tokens_per_second=plain[found.task, found.temperature],
                temperature=found.temperature,
                dtype=self.setting.get("dtype"),
                hardware=self.setting.get("device"),
            )
            for found in self.figures
            if found.contender == contender and found.mean_acceptance_length is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary for JSON."""
        return {
            "benchmark": "hf-specdec bench",
            **self.setting,
            "gate": None if self.gate is None else self.gate.to_dict(),
            "differences": [difference.to_dict() for difference in self.differences],
            "results": [found.to_dict() for found in self.figures],
        }


def gate(
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    contenders: Sequence[Contender],
    method: Method,
    advance: Callable[[], None] = lambda: None,
) -> Gate:
    """
    Compares greedy texts of this library's contenders with plain `generate`'s, in float32.

    Args:
        model (`PreTrainedModel`): the target in float32.
        prompts (`Sequence[EncodedPrompt]`): the prompts.
        contenders (`Sequence[Contender]`): all contenders; baselines are skipped.
        method (`Method`): `max_new_tokens` is used.
        advance (`Callable`): called after every call, `num_gate_calls` times.
    """
    ours = [contender for contender in contenders if contender.is_ours]
    return check(model, prompts, ours, max_new_tokens=method.max_new_tokens, advance=advance)


def measure(
    report: Report,
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    contenders: Sequence[Contender],
    method: Method,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Times the contenders at every temperature, and adds figures and greedy differences to `report`."""
    for temperature in method.temperatures:
        calls = compare(
            model,
            prompts,
            contenders,
            temperature=temperature,
            max_new_tokens=method.max_new_tokens,
            rounds=method.rounds,
            seed=method.seed,
            advance=advance,
        )
        firsts = list({prompt.task: prompt for prompt in reversed(prompts)}.values())[::-1]
        split = split_of_steps(
            model, firsts, contenders, temperature=temperature, max_new_tokens=method.max_new_tokens
        )
        report.figures += figures(calls, temperature=temperature, reference=REFERENCE, step_ms=split)
        if temperature == 0:
            report.differences += differences_of(model, prompts, calls, REFERENCE)


def num_gate_calls(num_prompts: int, contenders: Sequence[Contender]) -> int:
    """Number of times that `gate` calls `advance`."""
    return num_prompts * (1 + sum(contender.is_ours for contender in contenders))


def num_timed_calls(num_prompts: int, contenders: Sequence[Contender], method: Method) -> int:
    """Number of times that `measure` calls `advance`."""
    return len(method.temperatures) * num_calls(num_prompts, contenders, method.rounds)


def trace(
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    contenders: Sequence[Contender],
    method: Method,
    folder: Path,
) -> Path:
    """Writes a profiler trace of the first contender of this library into `folder`; returns the file's path."""
    ours = next(contender for contender in contenders if contender.is_ours)
    path = folder / "trace.json.gz"
    trace_call(model, prompts[0], ours, path, temperature=method.temperatures[0])
    return path
