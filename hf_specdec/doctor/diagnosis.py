"""What is wrong with a head: the findings, the verdict and the fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..eagle import EagleConfig


CLEARLY_BETTER = 1.05
"""An alternative is recommended from this ratio of acceptance lengths on; noise on a few hundred tokens is below."""
WEAK = 1.25
"""A chain's acceptance length below which a head is not worth its time."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """
    How a head does under one reading.

    Args:
        name (`str`): the reading.
        changes (`dict`): the arguments of `EagleHead.from_pretrained` for it.
        boundaries (`list[int]`): the target's hidden states it reads.
        top1 (`list[float]`): for every depth, how often the head's best token is the target's, along its own text.
        acceptance_length (`float`): tokens per step of a greedy chain as deep, the bonus included, if it started
            behind every token of the text.
    """

    name: str
    changes: dict[str, Any]
    boundaries: list[int]
    top1: list[float]
    acceptance_length: float

    @classmethod
    def from_hits(cls, hits: torch.Tensor, **fields: Any) -> Agreement:
        """From `hits` `[rows, depths]` bool: for chains behind every token, at which depths they are the text."""
        hits = hits.double()
        length = 1 + hits.cumprod(dim=1).sum(dim=1).mean()
        return cls(top1=hits.mean(dim=0).tolist(), acceptance_length=float(length), **fields)


@dataclass(eq=False)
class Diagnosis:
    """
    What the doctor found.

    Args:
        head (`str`), target (`str`): their names.
        format (`str`): the published format.
        config (`EagleConfig`): the head, as read.
        conventions (`dict[str, str]`): what was assumed, and why.
        keys (`dict[str, list[str]]`): "used" and "ignored" keys of the checkpoint.
        agreements (`list[Agreement]`): as read, then every alternative that was tried.
        num_tokens (`int`): tokens of the text.
        tree_acceptance_length (`float`, *optional*): tokens per step of real generation with the head's default tree,
            under the best reading.
        problem (`str`, *optional*): why the head cannot draft for the target at all.
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
        # The gain over plain decoding counts: the bonus token is everybody's.
        is_clear = best.acceptance_length - 1 > (self.as_read.acceptance_length - 1) * CLEARLY_BETTER + 0.02
        return best if is_clear and best.acceptance_length >= WEAK else self.as_read

    @property
    def is_good(self) -> bool:
        """Whether the head can be used as it is."""
        return self.problem is None and self.best is self.as_read and self.best.acceptance_length >= WEAK

    @property
    def verdict(self) -> str:
        """One sentence, and the fix."""
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
        """How to load the head under the best reading, as code."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.best.changes.items())
        return f"`EagleHead.from_pretrained({self.head!r}{arguments})`"
