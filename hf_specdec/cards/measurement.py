"""Measurements of a draft for model cards."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
        """The conditions that must be equal for figures to be comparable, by name."""
        setting = {"tree": self.tree, "temperature": self.temperature, "batch_size": self.batch_size}
        names = ("draft_sampling", "verification", "dtype", "hardware")
        return setting | {name: value for name in names if (value := getattr(self, name)) is not None}

    def eval_results(self) -> list[EvalResult]:
        """The figures as results for the card's model-index."""
        figures = [
            ("mean_acceptance_length", "Mean acceptance length (bonus token included)", self.mean_acceptance_length),
            ("draft_acceptance_rate", "Draft acceptance rate", self.draft_acceptance_rate),
            ("tokens_per_second", "Tokens per second", self.tokens_per_second),
            ("speed_up", "Speed-up over plain generate", self.speed_up),
        ]
        for position, share in enumerate(self.acceptance_per_position or (), 1):
            figures.append(("acceptance_per_position", f"Acceptance at position {position}", share))
        return [
            EvalResult(
                task_type="text-generation",
                task_name="Text generation",
                dataset_type=self.dataset_id or re.sub(r"\W+", "-", self.dataset.lower()).strip("-"),
                dataset_name=self.dataset,
                metric_type=kind,
                metric_name=name,
                metric_value=round(value, 4),
                metric_args=self.setting,
            )
            for kind, name, value in figures
            if value is not None
        ]
