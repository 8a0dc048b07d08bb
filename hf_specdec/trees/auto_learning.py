"""What a call learns under `tree="auto"`: acceptance, what drafting loses, how far a draft's estimates come true."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .auto import AutoTree
from .auto_tables import AcceptanceTable
from .confidence import LEAST_CHANCE, MOST_CHANCE, calibrated_chances
from .draft_tree import DraftTree
from .dynamic import DynamicTree


@dataclass
class Losses:
    """
    What drafting has cost more than it gained, in steps without a tree. Later gains make up for it, and so does a
    longer text, since a share of it may be lost.

    Args:
        asked (`int`, *optional*): most tokens that the text gets; None: any number.
        lost (`float`): what is lost, in steps without a tree.
        written (`float`): tokens of the text so far.
    """

    asked: int | None
    lost: float = 0.0
    written: float = 0.0

    MOST_AHEAD = 100
    """Most tokens still to come of which a share may be lost: a text may end long before it must."""
    UNKNOWN = 30
    """Tokens to come of a text of any length, for which a gain is expected."""
    MEMORY = 400.0
    """Tokens in which a loss is forgotten, exponentially."""
    MOST_GAIN = 3.0
    """Most gain that is held against later losses."""
    HOPE = 1.0
    """Share of the gain expected in the tokens to come that may be lost before."""

    def add(self, cost: float, tokens: float) -> None:
        """Adds a step that took as long as `cost` steps without a tree, and gave `tokens` per row."""
        self.written += tokens
        kept = max(1.0 - tokens / self.MEMORY, 0.0)
        self.lost = max(kept * self.lost + cost - tokens, -self.MOST_GAIN)

    def allow(self, share: float, cost: float = 0.0, speed: float = 1.0) -> bool:
        """
        Whether less than this share of the text is lost, even after a step that costs `cost` for nothing.

        Args:
            speed (`float`): expected tokens of drafting in the time of a step without a tree. What this gains in the
                tokens to come may be lost before, too.
        """
        asked = self.MOST_AHEAD if self.asked is None else min(self.asked, self.MOST_AHEAD)
        to_come = self.UNKNOWN if self.asked is None else min(max(self.asked - self.written, 0.0), self.MOST_AHEAD)
        gain = self.HOPE * to_come * max(1.0 - 1.0 / speed, 0.0) if speed > 0 else 0.0
        return self.lost + cost < share * asked + gain


class Ratio:
    """
    Tokens that a dynamic tree accepts, over those that the best static tree of its size would, as an average.

    Args:
        first (`float`), weight (`float`): the ratio before anything is counted, and its weight in tokens.
        decay (`float`): factor on earlier counts at every new one.
    """

    USUAL, USUAL_WEIGHT = 1.07, 60.0
    """Ratio of a draft of which nothing is known, and its weight in calls."""

    def __init__(self, first: float = 1.0, weight: float = 12.0, decay: float = 0.97):
        self._first, self._weight, self._decay = first, weight, decay
        self._expected, self._accepted = weight, first * weight

    @property
    def value(self) -> float:
        return self._accepted / self._expected

    def add(self, expected: float, accepted: float) -> None:
        self.fade(self._decay)
        self._expected += expected
        self._accepted += accepted

    def fade(self, decay: float) -> None:
        """Lets what was counted count less, and so the first ratio more."""
        rest = (1.0 - decay) * self._weight
        self._expected = decay * self._expected + rest
        self._accepted = decay * self._accepted + self._first * rest


class LastingTable(AcceptanceTable):
    """An `AcceptanceTable` of all texts, in which earlier counts stay."""

    DECAY = 1.0


Kind = tuple[float | None, bool]
"""Evidence on which a drafter proposes (None: none), and whether trees take best tokens although others are drawn."""


def _prior(kind: Kind, limits: AutoTree) -> tuple[float, ...] | None:
    return limits.prior if kind[0] is None else (kind[0],)


def _new_table(
    kind: Kind, limits: AutoTree, guesses: list[list[float]] | None = None, weight: float = AcceptanceTable.WEIGHT
) -> AcceptanceTable:
    return AcceptanceTable(limits.max_depth, limits.max_children, _prior(kind, limits), guesses, weight)


class Remembered:
    """
    Acceptance in all calls of a process, with which the next call begins. What has been counted often enough stays as
    it is, so that the same call chooses the same trees again.
    """

    ENOUGH = 256
    """Drafts of a kind that are enough."""
    WEIGHT = 12.0
    """
    Weight in drafts of what enough drafts accepted, when a text begins: texts differ in the acceptance of the best
    token by a standard deviation of about 0.12, as if each was a sample of so many drafts.
    """
    LEAST = 0.005
    """Least chance with which a call begins."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Kind, int, int], LastingTable] = {}
        self._ratios: dict[tuple[bool, DynamicTree], Ratio] = {}
        self._drafts: Counter[tuple[bool, DynamicTree]] = Counter()

    def new_table(self, kind: Kind, limits: AutoTree) -> AcceptanceTable:
        """A table for one call."""
        known = self._tables.get((kind, limits.max_depth, limits.max_children))
        if known is None:
            return _new_table(kind, limits)
        guesses = [[max(chance, self.LEAST) for chance in ranks] for ranks in known.chances()]
        usual = AcceptanceTable.WEIGHT
        weight = usual + (self.WEIGHT - usual) * min(known.num_drafts / self.ENOUGH, 1.0)
        return _new_table(kind, limits, guesses, weight)

    def ratio(self, takes_best: bool, tree: DynamicTree) -> float:
        """See `Ratio`."""
        key = takes_best, tree
        return self._ratios[key].value if key in self._ratios else Ratio.USUAL

    def add(self, kind: Kind, limits: AutoTree, draft: DraftTree, paths: list[list[int] | None]) -> None:
        """Counts one step."""
        key = kind, limits.max_depth, limits.max_children
        if key not in self._tables:
            self._tables[key] = LastingTable(limits.max_depth, limits.max_children, _prior(kind, limits))
        if self._tables[key].num_drafts < self.ENOUGH:
            self._tables[key].add(draft, paths)

    def add_ratio(self, takes_best: bool, tree: DynamicTree, expected: float, accepted: float) -> None:
        """Counts one step of a dynamic tree; see `Ratio`."""
        key = takes_best, tree
        self._drafts[key] += 1
        if self._drafts[key] <= self.ENOUGH:
            self._ratios.setdefault(key, Ratio(Ratio.USUAL, Ratio.USUAL_WEIGHT, 1.0)).add(expected, accepted)


class Acceptances:
    """
    Acceptance tables of a call, one for each kind of evidence on which a drafter proposes, and for trees of drawn and
    of best tokens.

    Args:
        limits (`AutoTree`): largest size of a tree, and the prior.
        remembered (`Remembered`, *optional*): what earlier calls accepted, to which this one adds.
    """

    def __init__(self, limits: AutoTree, remembered: Remembered | None = None):
        self._limits, self._remembered = limits, remembered
        self._tables, self._ratios = dict[Kind, AcceptanceTable](), dict[tuple[bool, DynamicTree], Ratio]()

    def of(self, evidence: float | None = None, takes_best: bool = False) -> AcceptanceTable:
        """
        The table for one kind of evidence, which is the prior chance of the best token, in twentieths; None: without
        evidence. `takes_best`: that for best tokens in a call that draws them otherwise.
        """
        evidence = None if evidence is None else rounded(evidence)
        key = evidence, takes_best
        if key not in self._tables:
            new = _new_table if self._remembered is None else self._remembered.new_table
            self._tables[key] = new(key, self._limits)
        return self._tables[key]

    def ratio(self, takes_best: bool, tree: DynamicTree) -> Ratio:
        """How a dynamic tree accepts beside static ones."""
        key = takes_best, tree
        if key not in self._ratios:
            known = self._remembered
            first = Ratio.USUAL if known is None else known.ratio(takes_best, tree)
            self._ratios[key] = Ratio(first, Ratio.USUAL_WEIGHT)
        return self._ratios[key]

    def add(self, evidence: float | None, takes_best: bool, draft: DraftTree, paths: list[list[int] | None]) -> None:
        """Counts one step; see `AcceptanceTable.add`."""
        table = self.of(evidence, takes_best)
        if self._remembered is not None:
            kind = None if evidence is None else rounded(evidence), takes_best
            self._remembered.add(kind, self._limits, draft, paths)
        table.add(draft, paths)

    def add_ratio(self, takes_best: bool, tree: DynamicTree, expected: float, accepted: float) -> None:
        """Counts one step of a dynamic tree; see `Ratio`."""
        self.ratio(takes_best, tree).add(expected, accepted)
        if self._remembered is not None:
            self._remembered.add_ratio(takes_best, tree, expected, accepted)

    def grow_older(self) -> None:
        """Lets what was counted count less, as after a step without a tree, in which the text goes on."""
        for table in self._tables.values():
            table.grow_older()


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
        self._log_odds, self._expected, self._hits = self.START, self.WEIGHT, self.WEIGHT

    @property
    def share(self) -> float:
        """Weight of the draft's estimates, from 0 to 1."""
        return 1.0 / (1.0 + math.exp(-self._log_odds))

    @property
    def factor(self) -> float:
        """How often estimates came true, over what they said."""
        return self._hits / self._expected

    def _within(self, chance: float) -> float:
        return min(max(chance, LEAST_CHANCE), MOST_CHANCE)

    def learn(self, confidence: float, learnt: float, is_hit: bool) -> None:
        """
        Takes an outcome.

        Args:
            confidence (`float`), learnt (`float`): the chance of a best child, by the draft and as measured before.
            is_hit (`bool`): whether the child was accepted.
        """
        of_confidence, of_learnt = (
            math.log(chance if is_hit else 1.0 - chance)
            for chance in (self._within(confidence * self.factor), self._within(learnt))
        )
        self._log_odds = max(-self.MOST, min(self.DECAY * self._log_odds + of_confidence - of_learnt, self.MOST))
        rest = (1.0 - self.DECAY) * self.WEIGHT
        self._expected = self.DECAY * self._expected + rest + confidence
        self._hits = self.DECAY * self._hits + rest + is_hit

    def chances(self, confidences: Sequence[float], learnt: list[list[float]]) -> list[list[float]]:
        """
        Chances `[depth][rank]` of one row in the step at hand: those learnt, where there are estimates joined with
        them; see `calibrated_chances`.
        """
        levels = min(len(confidences), len(learnt))
        if not levels:
            return learnt
        given = torch.tensor([confidences[:levels]], dtype=torch.float64, device="cpu")
        chances = torch.tensor(learnt[:levels], dtype=torch.float64, device="cpu")
        return calibrated_chances(given, chances, self.share, self.factor)[0].tolist() + learnt[levels:]


def rounded(chance: float) -> float:
    """A chance in twentieths: a confidence may be any number, but what is learnt for each must be seen often."""
    return round(20 * chance) / 20
