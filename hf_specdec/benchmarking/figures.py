"""Figures of timed calls: speed, speed-up, acceptance, and where the time of a step goes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..metrics import SpeculationMetrics
from .comparison import Call


ALL_TASKS = "all"
"""The name of what is taken over all tasks."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """
    What one contender reached with the prompts of one task.

    Args:
        task (`str`), contender (`str`), temperature (`float`): what was measured.
        tokens (`int`), seconds (`float`): sums over all timed calls.
        p20 (`float`), p50 (`float`), p80 (`float`): percentiles of the single calls' tokens per second.
        speed_up (`float`): tokens / seconds over that of plain `generate`.
        mean_acceptance_length (`float`, *optional*), acceptance_per_position (`list[float]`, *optional*): pooled over
            all drafts; None for baselines.
        step_ms (`dict[str, float]`, *optional*): milliseconds of a step: `draft`, `verify`, `rest`, or `whole`.
        identical (`int`, *optional*), texts (`int`): how many of the texts were plain `generate`'s; None if sampled.
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
    identical: int | None = None
    texts: int = field(default=0)

    @property
    def tokens_per_second(self) -> float:
        """Total tokens / total seconds."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def figures(
    calls: Sequence[Call],
    *,
    temperature: float,
    reference: str,
    step_ms: dict[str, dict[str, float]] | None = None,
) -> list[Figures]:
    """
    The figures of every task and contender, and of all tasks together, in the order of the calls.

    Args:
        temperature (`float`): of the calls; at 0 their texts are compared with the reference's.
        reference (`str`): the contender that speed-ups are over.
        step_ms (`dict`, *optional*): steps' milliseconds by contender, where they are not to come from the calls.
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
                    identical=identical if temperature == 0 else None,
                    texts=len(last),
                    **_speculation([call.metrics for call in own if call.metrics], (step_ms or {}).get(contender)),
                )
            )
    return found


def rate(calls: Sequence[Call]) -> float:
    """Total tokens / total seconds."""
    return sum(len(call.tokens) for call in calls) / sum(call.seconds for call in calls)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`p20`, `p50` and `p80`, with linear interpolation between the values."""
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def _speculation(all_metrics: Sequence[SpeculationMetrics], step_ms: dict[str, float] | None) -> dict[str, Any]:
    if not all_metrics:
        return {}
    pooled = pool(all_metrics)
    return {
        "mean_acceptance_length": pooled.mean_acceptance_length,
        "acceptance_per_position": pooled.acceptance_per_position,
        "step_ms": step_ms or milliseconds_of_step(all_metrics),
    }


def pool(all_metrics: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
    """The counts of several calls together."""
    pooled = SpeculationMetrics()
    for metrics in all_metrics:
        pooled.num_drafts += metrics.num_drafts
        pooled.num_draft_tokens += metrics.num_draft_tokens
        pooled.num_accepted_tokens += metrics.num_accepted_tokens
        pooled.accepted_per_step += metrics.accepted_per_step
        counts, more = pooled.num_accepted_per_position, metrics.num_accepted_per_position
        counts += [0] * (len(more) - len(counts))
        for position, count in enumerate(more):
            counts[position] += count
        for name, seconds in metrics.seconds.items():
            pooled.seconds[name] = pooled.seconds.get(name, 0.0) + seconds
    return pooled


def milliseconds_of_step(all_metrics: Sequence[SpeculationMetrics]) -> dict[str, float]:
    """
    Milliseconds per step that drafting, the target's forward, and the rest took, or of steps that ran as a whole on
    the device; the prefill is left out.
    """
    seconds = pool(all_metrics).seconds
    steps = max(sum(len(metrics.accepted_per_step[0]) for metrics in all_metrics), 1)
    if "steps" in seconds:
        return {"whole": 1000 * seconds["steps"] / steps}
    draft, verify = seconds.get("propose", 0.0), seconds.get("score", 0.0)
    rest = sum(seconds.values()) - seconds.get("prefill", 0.0) - draft - verify
    return {"draft": 1000 * draft / steps, "verify": 1000 * verify / steps, "rest": 1000 * rest / steps}
