"""Diagnosis of a head: findings, verdict and fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..block import BlockConfig
from ..eagle import EagleConfig
from ..gemma import GemmaAssistantConfig
from .measuring import Chains


CLEARLY_BETTER = 1.05
"""
Ratio of accepted draft tokens per step above which (by 0.02 at least) an alternative reading is recommended; noise on
a few hundred tokens is below it.
"""
CLEARLY_LIKELIER = 0.01
"""
Mean log-probability per token by which an alternative reading of a block head must be likelier to be recommended, and
by three standard errors at least: some mistakes hardly move acceptance.
"""
WEAK = 1.25
"""Acceptance length of a chain below which a head is not worth its time."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """
    Agreement of a head with its target under one reading.

    Args:
        name (`str`): name of the reading.
        changes (`dict`): arguments of the head's `from_pretrained` for the reading.
        boundaries (`list[int]`): the target's hidden states that the head reads.
        top1 (`list[float]`): by depth, share of the tokens of the target's text that are the head's best token.
        acceptance_length (`float`): mean tokens per step, the bonus token included, of greedy chains of that depth
            from every token of the text.
        log_prob (`float`): mean log-probability that the head gives to the tokens of the text, over all depths.
        log_probs (`torch.Tensor` of shape `[rows]`): the same of each chain.
        num_changes (`int`): how many readings are combined in it: 0 as read, 1 for one change, and so on.
    """

    name: str
    changes: dict[str, Any]
    boundaries: list[int]
    top1: list[float]
    acceptance_length: float
    log_prob: float
    log_probs: torch.Tensor = field(repr=False)
    num_changes: int = 1

    @classmethod
    def of(cls, chains: Sequence[Chains], **fields: Any) -> Agreement:
        """The agreement of chains from every token of some texts."""
        hits = torch.cat([some.hits for some in chains]).double()
        log_probs = torch.cat([some.log_probs for some in chains]).double()
        return cls(
            top1=hits.mean(dim=0).tolist(),
            acceptance_length=float(1 + hits.cumprod(dim=1).sum(dim=1).mean()),
            log_prob=float(log_probs.nanmean()),
            log_probs=log_probs.nanmean(dim=1),
            **fields,
        )

    def accepts_more_than(self, other: Agreement) -> bool:
        """Whether more draft tokens are accepted, clearly; without the bonus token, which plain decoding has too."""
        return self.acceptance_length - 1 > (other.acceptance_length - 1) * CLEARLY_BETTER + 0.02

    def is_likelier_than(self, other: Agreement) -> bool:
        """
        Whether the target's tokens are likelier, clearly: chain by chain. Neighbouring chains share tokens, so the
        standard error is that of means over runs as long as a chain.
        """
        gains = self.log_probs - other.log_probs
        gains = gains[gains.isfinite()]
        runs = [run.mean() for run in gains.split(len(self.top1))] if len(gains) else []
        if len(runs) < 2:
            return False
        means = torch.stack(runs)
        error = means.std() / len(means) ** 0.5
        return bool(means.mean() > max(CLEARLY_LIKELIER, 3 * float(error)))


def better_of(known: Agreement, others: Sequence[Agreement], is_block: bool) -> Agreement:
    """
    The reading among `others` that is clearly better than the known one: accepts more, or, if none does, accepts no
    less and gives the target's tokens a higher probability. (Not of EAGLE heads, whose later steps read what earlier
    ones made up: a norm too many may flatten them.) Else the known one.
    """
    best = max([known, *others], key=lambda agreement: agreement.acceptance_length)
    if best.accepts_more_than(known):
        return best
    if not is_block:
        return known
    likelier = [other for other in others if other.is_likelier_than(known) and not known.accepts_more_than(other)]
    return max(likelier, key=lambda agreement: agreement.log_prob, default=known)


@dataclass(eq=False)
class Diagnosis:
    """
    Findings of `diagnose`.

    Args:
        head (`str`), target (`str`): names of head and target.
        format (`str`): published format of the head.
        config (`EagleConfig`, `BlockConfig` or `GemmaAssistantConfig`): config of the head, as read.
        conventions (`dict[str, str]`): assumed conventions, with reasons; of block heads all of them.
        keys (`dict[str, list[str]]`): "used" and "ignored" keys of the checkpoint.
        agreements (`list[Agreement]`): the agreement as read, then that of every alternative reading, those of one
            change first.
        num_tokens (`int`): number of tokens that the target wrote.
        tree_acceptance_length (`float`, *optional*): tokens per step of real generation with the head's default tree,
            under the best reading.
        problem (`str`, *optional*): reason why the head cannot draft for the target at all.
    """

    head: str
    target: str
    format: str
    config: EagleConfig | BlockConfig | GemmaAssistantConfig
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
        """
        The reading to use: as read, unless an alternative is clearly better, see `better_of`. More changes must be
        clearly better than fewer.
        """
        best, rounds = self.as_read, max(agreement.num_changes for agreement in self.agreements)
        for changes in range(1, rounds + 1):
            others = [agreement for agreement in self.agreements if agreement.num_changes == changes]
            best = better_of(best, others, isinstance(self.config, BlockConfig))
        return best if best.acceptance_length >= WEAK else self.as_read

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
                f"{self.as_read.acceptance_length:.2f} to {best.acceptance_length:.2f}, and the mean log-probability "
                f"of the target's tokens from {self.as_read.log_prob:.2f} to {best.log_prob:.2f}. Load it with "
                f"{self.fix}."
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
        kind = "BlockHead" if isinstance(self.config, BlockConfig) else "EagleHead"
        kind = "GemmaAssistant" if isinstance(self.config, GemmaAssistantConfig) else kind
        return f"`{kind}.from_pretrained({self.head!r}{arguments})`"
