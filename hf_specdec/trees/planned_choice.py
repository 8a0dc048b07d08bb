"""What the choices under `"auto"` have in common: a few trials, then a plan, and what gives way to what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .auto_tables import AcceptanceTable, expected_length
from .choice import TreeChoice
from .token_tree import TokenTree


@dataclass
class Plan:
    """A tree, or none, and the tokens per second that it promises."""

    tree: TokenTree | None
    tokens_per_second: float


class PlannedChoice(TreeChoice, ABC):
    """
    Goes by a plan, which gives way to one that promises enough more.

    Args:
        times (`StepTimes` or `WholeTimes`): what is known of the machine; goes on learning.
        acceptance (`AcceptanceTable`): what is known of the texts; goes on learning.
        max_depth (`int`): most levels of a tree.
        middling (`TokenTree`): a tree that may well be of use.
    """

    REPLAN = 4
    """Steps between two plans."""
    GAIN = 1.03
    """How much better another tree must promise to be."""
    PROBE = 16
    """Steps without trees, at least, after which one carries a small tree, to see whether the text has changed."""

    def __init__(self, times: Any, acceptance: AcceptanceTable, max_depth: int, middling: TokenTree):
        super().__init__(None)
        self.times, self.acceptance = times, acceptance
        self._small = TokenTree.chain(min(2, max_depth))
        # On a new machine every kind of step twice: the first is slow for reasons of its own.
        self._trials = (None, self._small, None, self._small, middling, middling)
        self._to_try: list[TokenTree | None] = [] if times.are_known else list(self._trials)
        self._planned: TokenTree | None = None
        self._step = self._without = 0

    @abstractmethod
    def plan(self) -> Plan:
        """The best plan now."""

    def rate(self, tree: TokenTree | None) -> float:
        """Tokens per second that a tree promises now."""
        return self.rates([tree])[tree]

    def rates(self, trees: Iterable[TokenTree | None]) -> dict[TokenTree | None, float]:
        """The same of several, for which acceptance is reckoned once."""
        return {tree: tokens / self.times.of(tree) for tree, tokens in self.expected_tokens(trees).items()}

    def worth(self, tree: TokenTree | None) -> float:
        """By which trees, and none, are compared."""
        return self.rate(tree)

    def expected_tokens(self, trees: Iterable[TokenTree | None]) -> dict[TokenTree | None, float]:
        """Of a step with each of these trees."""
        chances = self.acceptance.chances()
        return {tree: expected_length(() if tree is None else tree.paths, chances) for tree in trees}

    def _go_by_plan(self) -> None:
        """For a step that is there to try nothing: looks at the plan again, if it is time to."""
        if self._step % self.REPLAN == 0 and self.times.has(None):
            tree = self.plan().tree
            if self.worth(tree) > self.GAIN * self.worth(self._planned):
                self._planned = tree
        self._step += 1
        self._without = self._without + 1 if self._planned is None else 0

    def _probe(self) -> TokenTree:
        """The small tree, for a step after many without."""
        self._without = 0
        return self._small
