"""Drawn or best tokens in captured steps under `tree="auto"`, each of which has graphs of its own."""

from __future__ import annotations

from .auto_learning import Acceptances
from .auto_tables import AcceptanceTable, expected_of
from .capture_budget import CaptureBudget
from .dynamic import DynamicTree
from .token_tree import TokenTree


class CandidateWays:
    """
    Says whether a captured step's trees are filled with drawn tokens or with the draft's best ones: with those of
    which more are accepted. As on the host, both are taken to need the same time.

    Args:
        acceptance (`Acceptances`): acceptance of both, which is learnt anew in every call.
        with_best (`set`): trees whose steps with best tokens were run, and so captured; kept for later
            calls.
        was_tried (`bool`): whether an earlier call has tried best tokens, so that this one need not at its beginning.
    """

    GAIN = 1.03
    """Factor by which the other tokens must promise more."""
    AT_FIRST, EVERY, BURST = 8, 96, 6
    """Steps after which the others are tried, steps from one trial to the next, and steps of a trial."""

    REPLAN = 8
    """Steps from one comparison to the next."""

    def __init__(self, acceptance: Acceptances, with_best: set[TokenTree | DynamicTree], was_tried: bool = False):
        self._tables = acceptance.of(None, False), acceptance.of(None, True)
        self._with_best, self._plans_best = with_best, False
        self._step, self._trial_at, self._left = 0, self.EVERY // 2 if was_tried else self.AT_FIRST, 0
        self._has_tried_best = False
        """Whether the call has tried best tokens: what is assumed of them before says nothing beside drawn ones."""
        self.captures: CaptureBudget | None = None
        """Says whether trees may be taken that have no graph with best tokens yet; None: they may."""
        self.may_capture = True
        """Whether captures are for steps at all; not after a warm-up."""
        self.takes_best = False
        """Whether the present step takes best tokens."""

    @property
    def planned(self) -> AcceptanceTable:
        """Acceptance of the tokens that steps take, apart from trials."""
        return self._tables[self._plans_best]

    @property
    def present(self) -> AcceptanceTable:
        """Acceptance of the tokens that the present step takes."""
        return self._tables[self.takes_best]

    def begin_step(self, tree: TokenTree | DynamicTree | None) -> None:
        """Chooses the tokens of a step with this tree."""
        self.takes_best = False
        if tree is None:
            return
        self._count_step(tree)
        if self._trial_is_due(tree):
            self._trial_at, self._left = self._step + self.EVERY, self.BURST
        is_trial = self._left > 0 and self._may_take(tree, not self._plans_best)
        self._left -= is_trial
        self.takes_best = self._plans_best != is_trial and self._may_take(tree, True)
        if self.takes_best:
            if tree not in self._with_best and self.captures is not None:
                self.captures.charge()
            self._with_best.add(tree)
            self._has_tried_best |= self._left == 0

    def begin_next(self, tree: TokenTree | DynamicTree | None) -> bool:
        """Begins a step like the one before, which has not ended. Returns False if it may take other tokens."""
        if tree is None:
            return True
        if self._left and self._may_take(tree, not self._plans_best):
            return False
        self._count_step(tree)
        return not self._trial_is_due(tree) and self.takes_best == (self._plans_best and self._may_take(tree, True))

    def _count_step(self, tree: TokenTree | DynamicTree) -> None:
        self._step += 1
        if self._step % self.REPLAN or not self._has_tried_best:
            return
        drawn, best = (expected_of(tree, table.chances()) for table in self._tables)
        now, other = (best, drawn) if self._plans_best else (drawn, best)
        if other > self.GAIN * now:
            self._plans_best = not self._plans_best

    def _trial_is_due(self, tree: TokenTree | DynamicTree) -> bool:
        return self._left == 0 and self._step >= self._trial_at and self._may_take(tree, not self._plans_best)

    def _may_take(self, tree: TokenTree | DynamicTree, best: bool) -> bool:
        # The first tree is captured to compare both; others once best tokens are known to give more.
        is_wanted = self._plans_best or not self._with_best
        if not best or tree in self._with_best:
            return True
        return self.may_capture and is_wanted and (self.captures is None or self.captures.allows())
