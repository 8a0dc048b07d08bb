"""Diagnosis of a head: findings, verdict and fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..eagle import EagleConfig


CLEARLY_BETTER = 1.05
"""
Ratio of accepted draft tokens per step above which (by 0.02 at least) an alternative reading is recommended; noise on
a few hundred tokens is below it.
"""
WEAK = 1.25
"""Acceptance length of a chain below which a head is not worth its time."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """
    Agreement of a head with its target under one reading.

    Args:
        name (`str`): name of the reading.
        changes (`dict`): arguments of `EagleHead.from_pretrained` for the reading.
        boundaries (`list[int]`): the target's hidden states that the head reads.
        top1 (`list[float]`): by depth, share of the tokens of the target's text that are the head's best token.
        acceptance_length (`float`): mean tokens per step, the bonus token included, of greedy chains of that depth
            from every token of the text.
    """

    name: str
    changes: dict[str, Any]
    boundaries: list[int]
    top1: list[float]
    acceptance_length: float

    @classmethod
    def from_hits(cls, hits: torch.Tensor, **fields: Any) -> Agreement:
        """The agreement from `hits` `[rows, depths]` bool of chains from every token, see `hits_on`."""
        hits = hits.double()
        length = 1 + hits.cumprod(dim=1).sum(dim=1).mean()
        return cls(top1=hits.mean(dim=0).tolist(), acceptance_length=float(length), **fields)


@dataclass(eq=False)
class Diagnosis:
    """
    Findings of `diagnose`.

    Args:
        head (`str`), target (`str`): names of head and target.
        format (`str`): published format of the head.
        config (`EagleConfig`): config of the head, as read.
        conventions (`dict[str, str]`): assumed conventions, with reasons.
        keys (`dict[str, list[str]]`): "used" and "ignored" keys of the checkpoint.
        agreements (`list[Agreement]`): the agreement as read, then that of every alternative reading.
        num_tokens (`int`): number of tokens that the target wrote.
        tree_acceptance_length (`float`, *optional*): tokens per step of real generation with the head's default tree,
            under the best reading.
        problem (`str`, *optional*): reason why the head cannot draft for the target at all.
    """

    head: str
    target: str
    format: str
    config: EagleConfig
    conventions: dict[str, str]
    keys: dict[str, list[str]] = field(repr=False)
    agreements: list[Agreement] = field(default_factory=list)
    num_tokens: int = 0
    tree_acceptance_length: float | None = None
    problem: str | None = None

    @property
    def as_read(self) -> Agreement:
        return self.agreements[0]

    @property
    def best(self) -> Agreement:
        """The reading to use: as read, unless an alternative is clearly better."""
        best = max(self.agreements, key=lambda agreement: agreement.acceptance_length)
        # The ratio is taken without the bonus token, which plain decoding has too.
        is_clear = best.acceptance_length - 1 > (self.as_read.acceptance_length - 1) * CLEARLY_BETTER + 0.02
        return best if is_clear and best.acceptance_length >= WEAK else self.as_read

    @property
    def is_good(self) -> bool:
        """Whether the head, as read, fits the target and is worth its time."""
        return self.problem is None and self.best is self.as_read and self.best.acceptance_length >= WEAK

    @property
    def verdict(self) -> str:
        """The diagnosis in words, with the fix if there is one."""
        if self.problem is not None:
            return f"The head does not fit the target. {self.problem}"
        best = self.best
        if best is not self.as_read:
            return (
                f"The head is misread: {best.name} raises the acceptance length from "
                f"{self.as_read.acceptance_length:.2f} to {best.acceptance_length:.2f}. Load it with {self.fix}."
            )
        if best.acceptance_length < WEAK:
            return (
                f"The head agrees too little with this target ({best.acceptance_length:.2f} tokens a step), and no "
                "other reading helps: it was trained for another target or other text, or too briefly. Check "
                f"`target_name` ({self.config.target_name or 'not given'}), or train one with `hf-specdec train`."
            )
        return f"The head fits as it is read: {best.acceptance_length:.2f} tokens a step in a chain."

    @property
    def fix(self) -> str:
        """Code that loads the head under the best reading."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.best.changes.items())
        return f"`EagleHead.from_pretrained({self.head!r}{arguments})`"
