"""What a call learns under `tree="auto"`: acceptance, what drafting loses, how far a draft's estimates come true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .auto import AutoTree
from .auto_tables import AcceptanceTable
from .told import LEAST_CHANCE, MOST_CHANCE, told_chances


@dataclass
class Losses:
    """
    What drafting has cost more than it gained, in steps without a tree. Later gains make up for it, and so does a
    longer text, since a share of it may be lost.

    Args:
        asked (`int`, *optional*): most tokens that the text gets; None: any number.
    """

    asked: int | None
    lost: float = 0.0

    MOST_AHEAD = 100
    """Most tokens still to come of which a share may be lost: a text may end long before it must."""
    MEMORY = 400.0
    """Tokens in which a loss is forgotten, exponentially."""
    MOST_GAIN = 3.0
    """Most gain that is held against later losses."""

    def add(self, cost: float, tokens: float) -> None:
        """Adds a step that took as long as `cost` steps without a tree, and gave `tokens` per row."""
        kept = max(1.0 - tokens / self.MEMORY, 0.0)
        self.lost = max(kept * self.lost + cost - tokens, -self.MOST_GAIN)

    def allow(self, share: float, cost: float = 0.0) -> bool:
        """Whether less than this share of the text is lost, even after a step that costs `cost` for nothing."""
        asked = self.MOST_AHEAD if self.asked is None else min(self.asked, self.MOST_AHEAD)
        return self.lost + cost < share * asked


class Acceptances:
    """
    Acceptance tables of a call, one for each kind of evidence on which a drafter proposes, and for trees of drawn and
    of best tokens.

    Args:
        limits (`AutoTree`): largest size of a tree, and the prior.
    """

    def __init__(self, limits: AutoTree):
        self._limits, self._tables = limits, dict[tuple[float | None, bool], AcceptanceTable]()

    def of(self, evidence: float | None = None, takes_best: bool = False) -> AcceptanceTable:
        """
        The table for one kind of evidence, which is the prior chance of the best token, in twentieths; None: without
        evidence. `takes_best`: that for best tokens in a call that draws them otherwise.
        """
        evidence = None if evidence is None else rounded(evidence)
        key = evidence, takes_best
        if key not in self._tables:
            prior = self._limits.prior if evidence is None else (evidence,)
            self._tables[key] = AcceptanceTable(self._limits.max_depth, self._limits.max_children, prior)
        return self._tables[key]

    def grow_older(self) -> None:
        """Lets what was counted count less, as after a step without a tree, in which the text goes on."""
        for table in self._tables.values():
            table.grow_older()


class Ratio:
    """Tokens that a dynamic tree accepts, over those that the best static tree of its size would, as an average."""

    WEIGHT, DECAY = 12.0, 0.97

    def __init__(self) -> None:
        self._expected = self._accepted = self.WEIGHT

    @property
    def value(self) -> float:
        return self._accepted / self._expected

    def add(self, expected: float, accepted: float) -> None:
        rest = (1.0 - self.DECAY) * self.WEIGHT
        self._expected = self.DECAY * self._expected + rest + expected
        self._accepted = self.DECAY * self._accepted + rest + accepted


class Trust:
    """
    How far a draft's own estimates of its acceptance count beside what was measured before: the mean of both, in which
    each has the weight by which it foretold the latest outcomes better (as in a Bayesian average of models). An
    estimate is first multiplied by how often the estimates came true.
    """

    WEIGHT, DECAY = 8.0, 0.985
    """Weight in drafts of the assumption that estimates come true; factor on earlier outcomes at every new one."""
    START, MOST = -0.7, 8.0
    """Logarithm of the odds for estimates at first, and the most by which it favours either."""

    def __init__(self) -> None:
        self._log_odds, self._told, self._hits = self.START, self.WEIGHT, self.WEIGHT

    @property
    def share(self) -> float:
        """Weight of the draft's estimates, from 0 to 1."""
        return 1.0 / (1.0 + math.exp(-self._log_odds))

    @property
    def factor(self) -> float:
        """How often estimates came true, over what they said."""
        return self._hits / self._told

    def _within(self, chance: float) -> float:
        return min(max(chance, LEAST_CHANCE), MOST_CHANCE)

    def learn(self, told: float, learnt: float, is_hit: bool) -> None:
        """
        Takes an outcome.

        Args:
            told (`float`), learnt (`float`): the chance of a node's best child as the draft told it, and as it was
                measured before.
            is_hit (`bool`): whether the child was accepted.
        """
        of_told, of_learnt = (
            math.log(chance if is_hit else 1.0 - chance)
            for chance in (self._within(told * self.factor), self._within(learnt))
        )
        self._log_odds = max(-self.MOST, min(self.DECAY * self._log_odds + of_told - of_learnt, self.MOST))
        rest = (1.0 - self.DECAY) * self.WEIGHT
        self._told = self.DECAY * self._told + rest + told
        self._hits = self.DECAY * self._hits + rest + is_hit

    def chances(self, told: Sequence[float], learnt: list[list[float]]) -> list[list[float]]:
        """
        Chances `[depth][rank]` of one row in the step at hand: those learnt, where there are estimates joined with
        them; see `told_chances`.
        """
        levels = min(len(told), len(learnt))
        if not levels:
            return learnt
        given = torch.tensor([told[:levels]], dtype=torch.float64, device="cpu")
        chances = torch.tensor(learnt[:levels], dtype=torch.float64, device="cpu")
        return told_chances(given, chances, self.share, self.factor)[0].tolist() + learnt[levels:]


def rounded(chance: float) -> float:
    """A chance in twentieths: drafters may tell any number, but what is learnt for each must be seen often."""
    return round(20 * chance) / 20
