"""Measurements of a draft for model cards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult


if TYPE_CHECKING:
    from ..metrics import SpeculationMetrics


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """
    Acceptance and speed of a draft on one set of prompts with one tree.

    Args:
        dataset (`str`): name of the prompts, such as "MT-bench".
        tree (`str`): the tree as in `tree=`, or its description.
        mean_acceptance_length (`float`): tokens per step, the bonus token included.
        acceptance_per_position (`tuple[float, ...]`, *optional*): share of the drafts whose accepted path reaches
            depth 1, 2, …
        draft_acceptance_rate (`float`, *optional*): accepted / drafted tokens.
        tokens_per_second (`float`, *optional*): speed with the draft.
        plain_tokens_per_second (`float`, *optional*): speed of plain `generate` in the same setting.
        temperature (`float`, *optional*, defaults to 0.0): temperature; 0 is greedy.
        draft_sampling (`str`, *optional*), verification (`str`, *optional*): values of `SpeculativeConfig`.
        batch_size (`int`, *optional*, defaults to 1): texts generated at a time.
        dtype (`str`, *optional*): dtype of the target.
        hardware (`str`, *optional*): machine of the measurement.
        dataset_id (`str`, *optional*): Hub id of the prompts.
    """

    dataset: str
    tree: str
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...] | None = None
    draft_acceptance_rate: float | None = None
    tokens_per_second: float | None = None
    plain_tokens_per_second: float | None = None
    temperature: float = 0.0
    draft_sampling: str | None = None
    verification: str | None = None
    batch_size: int = 1
    dtype: str | None = None
    hardware: str | None = None
    dataset_id: str | None = None

    @classmethod
    def from_metrics(cls, metrics: SpeculationMetrics, **fields: Any) -> Measurement:
        """A measurement with the acceptance of `hf_specdec.last_metrics()`."""
        return cls(
            mean_acceptance_length=metrics.mean_acceptance_length,
            acceptance_per_position=tuple(metrics.acceptance_per_position),
            draft_acceptance_rate=metrics.draft_acceptance_rate,
            **fields,
        )

    @property
    def speed_up(self) -> float | None:
        """Tokens per second relative to plain `generate`; None if either was not measured."""
        if not self.tokens_per_second or not self.plain_tokens_per_second:
            return None
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def setting(self) -> dict[str, Any]:
        """What an acceptance length depends on besides the prompts, by name."""
        setting = {"tree": self.tree, "temperature": self.temperature}
        names = ("draft_sampling", "verification")
        return setting | {name: value for name in names if (value := getattr(self, name)) is not None}

    def eval_result(self) -> EvalResult:
        """The mean acceptance length as a result for the card's model-index."""
        return EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=self.dataset_id or re.sub(r"\W+", "-", self.dataset.lower()).strip("-"),
            dataset_name=self.dataset,
            metric_type="mean_acceptance_length",
            metric_name="Mean acceptance length (bonus token included)",
            metric_value=round(self.mean_acceptance_length, 4),
            metric_args=self.setting,
        )


def longest_of_each_tree(measurements: Iterable[Measurement]) -> list[Measurement]:
    """For each set of prompts, temperature and tree, the measurement with the largest mean acceptance length."""
    found: dict[tuple[str, float, str], Measurement] = {}
    for measurement in measurements:
        key = measurement.dataset, measurement.temperature, measurement.tree
        found[key] = max(found.get(key, measurement), measurement, key=lambda one: one.mean_acceptance_length)
    return list(found.values())


def write_measurements(measurements: Iterable[Measurement], path: Path) -> None:
    """Writes measurements with all their figures as JSON."""
    rows = [{name: value for name, value in asdict(one).items() if value is not None} for one in measurements]
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    path.write_text(f'{{"measurements": [\n{lines}\n]}}\n', encoding="utf-8")


def read_measurements(path: Path) -> list[Measurement]:
    """
    Reads what `write_measurements` wrote.

    Raises:
        KeyError, TypeError, ValueError: if the file is something else.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    return [Measurement(**row | _as_tuples(row)) for row in rows]


def _as_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
