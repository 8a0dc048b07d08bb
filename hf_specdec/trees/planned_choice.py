"""Base of the choices under `tree="auto"`: a few trial steps, then a plan that gives way to better ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from .auto import Plan
from .auto_tables import AcceptanceTable, expected_length
from .choice import TreeChoice
from .token_tree import TokenTree


class PlannedChoice(TreeChoice, ABC):
    """
    Follows a plan until another one promises more than `GAIN` times as much.

    Args:
        times (`StepTimes` or `WholeTimes`): measured step times of this machine, updated by every step.
        acceptance (`AcceptanceTable`): measured acceptance of the texts, updated by every step.
        max_depth (`int`): most levels of a tree.
        middling (`TokenTree`): a tree of medium size, for trial steps.
    """

    REPLAN = 4
    """Steps from one plan to the next."""
    GAIN = 1.03
    """Factor by which another tree must promise to be better than the planned one."""
    PROBE = 16
    """Fewest steps without a tree after which one carries a small tree, to see whether acceptance has changed."""

    def __init__(self, times: Any, acceptance: AcceptanceTable, max_depth: int, middling: TokenTree):
        super().__init__(None)
        self.times, self.acceptance = times, acceptance
        self._small = TokenTree.chain(min(2, max_depth))
        # Without known times, every kind of step is tried twice, because the first one includes warming up.
        self._trials = (None, self._small, None, self._small, middling, middling)
        self._to_try: list[TokenTree | None] = [] if times.are_known else list(self._trials)
        self._planned: TokenTree | None = None
        self._step = self._without = 0

    @abstractmethod
    def plan(self) -> Plan[TokenTree]:
        """The best plan now."""

    def rate(self, tree: TokenTree | None) -> float:
        """Expected tokens per second of steps with `tree` (None: without a tree)."""
        return self.rates([tree])[tree]

    def rates(self, trees: Iterable[TokenTree | None]) -> dict[TokenTree | None, float]:
        """Expected tokens per second with each of several trees; acceptance is computed once for all of them."""
        return {tree: tokens / self.times.of(tree) for tree, tokens in self.expected_tokens(trees).items()}

    def worth(self, tree: TokenTree | None) -> float:
        """Value by which trees, and no tree, are compared: here the expected tokens per second."""
        return self.rate(tree)

    def expected_tokens(self, trees: Iterable[TokenTree | None]) -> dict[TokenTree | None, float]:
        """Expected tokens per row of a step with each of these trees."""
        chances = self.acceptance.chances()
        return {tree: expected_length(() if tree is None else tree.paths, chances) for tree in trees}

    def _go_by_plan(self) -> None:
        """Counts a step that follows the plan, and renews the plan every `REPLAN` steps."""
        self._renew_plan()
        self._count_step()

    def _renew_plan(self) -> None:
        if self._step % self.REPLAN == 0 and self.times.has(None):
            tree = self.plan().tree
            if self.worth(tree) > self.GAIN * self.worth(self._planned):
                self._planned = tree

    def _count_step(self) -> None:
        self._step += 1
        self._without = self._without + 1 if self._planned is None else 0

    def _probe(self) -> TokenTree:
        """The small tree, for a probe after many steps without a tree."""
        self._without = 0
        return self._small
