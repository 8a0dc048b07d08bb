"""Figures of timed calls: speed, speed-up, acceptance, and the time of a step's phases."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..metrics import SpeculationMetrics
from .comparison import Call


ALL_TASKS = "all"
"""Task name of figures over all tasks."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """
    Figures of one contender on the prompts of one task.

    Args:
        task (`str`), contender (`str`), temperature (`float`): task, contender and temperature of the calls.
        tokens (`int`), seconds (`float`): sums over all timed calls.
        p20 (`float`), p50 (`float`), p80 (`float`): percentiles of the single calls' tokens per second.
        speed_up (`float`): tokens / seconds divided by plain `generate`'s.
        mean_acceptance_length (`float`, *optional*), acceptance_per_position (`list[float]`, *optional*): acceptance
            pooled over all drafts; None for baselines.
        step_ms (`dict[str, float]`, *optional*): milliseconds of a step: `draft`, `verify`, `rest`, or `whole`.
        mean_accepted_tokens (`float`, *optional*): tokens of a step as Spec-Bench counts them: the mean over all
            steps, those without drafts included, of the accepted tokens and the one after them; None for baselines.
        mean_speed (`float`), mean_speed_up (`float`): tokens per second as Spec-Bench has them: the mean over all
            questions, with all their turns; and this mean divided by plain `generate`'s.
        identical (`int`, *optional*): texts of the last round that equal plain `generate`'s; None if sampled.
        texts (`int`): texts of the last round.
    """

    task: str
    contender: str
    temperature: float
    tokens: int
    seconds: float
    p20: float
    p50: float
    p80: float
    speed_up: float
    mean_acceptance_length: float | None = None
    acceptance_per_position: list[float] | None = None
    step_ms: dict[str, float] | None = None
    mean_accepted_tokens: float | None = None
    mean_speed: float | None = None
    mean_speed_up: float | None = None
    identical: int | None = None
    texts: int = field(default=0)

    @property
    def tokens_per_second(self) -> float:
        """Total tokens / total seconds of the figures' calls."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The figures as a dictionary for JSON."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def figures(
    calls: Sequence[Call],
    *,
    temperature: float,
    reference: str,
    step_ms: dict[tuple[str, str], dict[str, float]] | None = None,
) -> list[Figures]:
    """
    The figures of every task and contender, and of all tasks together, in the order of the calls.

    Args:
        calls (`Sequence[Call]`): the timed calls.
        temperature (`float`): temperature of the calls; at 0 the texts are compared with the reference's.
        reference (`str`): name of the contender that speed-ups are relative to.
        step_ms (`dict`, *optional*): milliseconds of a step by phase, for pairs of a task and a contender, in place of
            those of the calls.
    """
    tasks = list(dict.fromkeys(call.task for call in calls))
    contenders = list(dict.fromkeys(call.contender for call in calls))
    found = []
    for task in [*tasks, *([ALL_TASKS] if len(tasks) > 1 else [])]:
        of_task = [call for call in calls if task in (call.task, ALL_TASKS)]
        plain = [call for call in of_task if call.contender == reference]
        texts = {(call.prompt, call.round): call.tokens for call in plain}
        for contender in contenders:
            own = [call for call in of_task if call.contender == contender]
            last_round = max(call.round for call in own)
            last = [call for call in own if call.round == last_round]
            split = (step_ms or {}).get((task, contender))
            identical = sum(call.tokens == texts[call.prompt, call.round] for call in last)
            found.append(
                Figures(
                    task=task,
                    contender=contender,
                    temperature=temperature,
                    tokens=sum(len(call.tokens) for call in own),
                    seconds=sum(call.seconds for call in own),
                    **percentiles([call.tokens_per_second for call in own]),  # type: ignore[arg-type]
                    speed_up=rate(own) / rate(plain),
                    mean_speed=mean_speed(own),
                    mean_speed_up=mean_speed(own) / mean_speed(plain),
                    identical=identical if temperature == 0 else None,
                    texts=len(last),
                    **_speculation([call.metrics for call in own if call.metrics], split),
                )
            )
    return found


def rate(calls: Sequence[Call]) -> float:
    """Tokens per second of calls: total tokens / total seconds."""
    return sum(len(call.tokens) for call in calls) / sum(call.seconds for call in calls)


def mean_speed(calls: Sequence[Call]) -> float:
    """The mean over all questions of the tokens per second of their turns together, as in Spec-Bench."""
    turns: dict[tuple[int, int], list[Call]] = {}
    for call in calls:
        question = call.prompt if call.question is None else call.question
        turns.setdefault((question, call.round), []).append(call)
    return statistics.fmean(map(rate, turns.values()))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The percentiles `p20`, `p50` and `p80` of values, with linear interpolation."""
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def _speculation(all_metrics: Sequence[SpeculationMetrics], step_ms: dict[str, float] | None) -> dict[str, Any]:
    if not all_metrics:
        return {}
    pooled = SpeculationMetrics.sum_of(all_metrics)
    steps = list(itertools.chain(*pooled.accepted_per_step))
    return {
        "mean_acceptance_length": pooled.mean_acceptance_length,
        "acceptance_per_position": pooled.acceptance_per_position,
        "mean_accepted_tokens": 1 + (statistics.fmean(steps) if steps else 0.0),
        "step_ms": step_ms or milliseconds_of_step(all_metrics),
    }


def milliseconds_of_step(all_metrics: Sequence[SpeculationMetrics]) -> dict[str, float]:
    """
    Milliseconds per step, without the prefill: of drafting, the target's forward and the rest, or of the whole step
    where the device runs it as one.
    """
    seconds = SpeculationMetrics.sum_of(all_metrics).seconds
    steps = max(sum(len(metrics.accepted_per_step[0]) for metrics in all_metrics), 1)
    if "steps" in seconds:
        return {"whole": 1000 * seconds["steps"] / steps}
    draft, verify = seconds.get("propose", 0.0), seconds.get("score", 0.0)
    rest = sum(seconds.values()) - seconds.get("prefill", 0.0) - draft - verify
    return {"draft": 1000 * draft / steps, "verify": 1000 * verify / steps, "rest": 1000 * rest / steps}
