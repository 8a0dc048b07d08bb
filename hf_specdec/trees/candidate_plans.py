"""`CandidatePlans`: what steps with each of a few trees promise, and which of these steps may be taken."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .auto import AutoTree, Plan
from .auto_learning import Ratio
from .auto_tables import AcceptanceTable
from .candidate_learning import CandidateLearning
from .candidate_trees import CandidateTrees
from .capture_budget import CaptureBudget
from .choice import TreeChoice
from .dynamic import DynamicTree
from .whole_times import Tree, WholeTimes


class CandidatePlans(TreeChoice):
    """
    The part of a `CandidateChoice` that compares: tokens per second by measured times and acceptance, among trees that
    are captured, or whose captures pay.

    Args:
        times (`WholeTimes`), limits (`AutoTree`), acceptance (`AcceptanceTable`), advantages (`dict`): see
            `CandidateChoice`.
    """

    WORTH = 1.05
    """
    Factor by which a tree must promise more tokens per second than no tree. Load slows steps with trees by more than
    plain ones, which are not timed meanwhile, so that a tree with a small advantage may well lose.
    """

    def __init__(
        self,
        times: WholeTimes,
        limits: AutoTree,
        acceptance: AcceptanceTable,
        advantages: dict[DynamicTree, Ratio] | None = None,
    ):
        super().__init__(None)
        self.times, self.candidates = times, CandidateTrees(limits, times).trees
        self.learning = CandidateLearning(acceptance, {} if advantages is None else advantages)
        self.most_nodes: int | None = None
        """Most draft tokens per row of the next step; None for no limit."""
        self.ready: frozenset[Any] | None = None
        """Trees (None: no tree) for which the next step captures nothing; None if captures do not matter."""
        self.captures = CaptureBudget()
        """Says which captures pay."""

    def plan(self, captures: bool = False) -> Plan[Tree]:
        """
        The best plan now, among trees that were timed or have at most `times.reach` nodes; with `captures` also among
        those that may not be captured.
        """
        reach = self.times.reach
        trees = [tree for tree in self._allowed if self.times.has(tree) or tree.num_nodes <= reach]
        able = [tree for tree in (None, *trees) if captures or self._may_take(tree)] or [None]
        rates = self.rates(able)
        best = max(rates, key=lambda tree: self._worth(tree, rates[tree]))
        return Plan(best, rates[best])

    def worth(self, tree: Tree | None) -> float:
        """Value by which trees, and no tree, are compared."""
        return self._worth(tree, self.rate(tree))

    def _worth(self, tree: Tree | None, rate: float) -> float:
        """
        The value of a tree with this rate: of few drafts it is what they may well turn out to accept, since steps
        without a tree teach nothing, and those with a bad one soon show what they are.
        """
        return rate if tree is None else (rate + self.learning.doubt() / self.times.of(tree)) / self.WORTH

    def rate(self, tree: Tree | None) -> float:
        """Expected tokens per second of steps with `tree` (None: without a tree)."""
        return self.rates([tree])[tree]

    def rates(self, trees: Collection[Tree | None]) -> dict[Tree | None, float]:
        """Expected tokens per second with each of several trees; acceptance is computed once for all of them."""
        tokens = self.learning.expected_tokens(trees)
        return {tree: number / self.times.of(tree) for tree, number in tokens.items()}

    @property
    def _allowed(self) -> list[Tree]:
        return [tree for tree in self.candidates if self.most_nodes is None or tree.num_nodes <= self.most_nodes]

    # ------------------------------------------------------------------------------------------------------ captures

    @property
    def _ready_trees(self) -> list[Tree]:
        """Trees that can be tried without a capture."""
        return [tree for tree in self._allowed if self.ready is None or tree in self.ready]

    def _may_take(self, tree: Tree | None) -> bool:
        """Whether the step may have this tree: it captures nothing, or must capture something anyway, or that pays."""
        return not self.ready or tree in self.ready or self.captures.allows(*self._lost_without(tree))

    def _lost_without(self, tree: Tree | None) -> tuple[float, float]:
        """Seconds that steps have lost for want of a capture, of the seconds of all of them."""
        return self.times.owed.get(tree, 0.0), self.times.seconds

    def _may_try(self, tree: Tree | None) -> bool:
        """
        Whether the step may have this tree so that it is timed. A tree to compare with none need not pay for a
        capture, nor the other way round.
        """
        return self._may_take(tree) or (self._is_first(tree) and not self.captures.is_closed)

    def _is_first(self, tree: Tree | None) -> bool:
        """Whether this is the first tree, or the first step without one."""
        return not self._ready_trees if tree is not None else not self.times.has(None)

    def _pay_for_capture(self, tree: Tree | None) -> None:
        """Takes note of a capture that the step does not need."""
        if self.ready and tree not in self.ready and not self._is_first(tree):
            self.captures.charge(*self._lost_without(tree))
            self.times.owed.pop(tree, None)
