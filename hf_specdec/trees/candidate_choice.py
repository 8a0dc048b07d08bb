"""
`tree="auto"` for captured steps of requests in flight: a choice among a few trees, each timed as a whole step.

Every tree costs a capture, so that there are only a few, the same for every text, and all but the drafter's own wait
until a capture pays (`CaptureBudget`). How long a step with each takes depends on the load, which changes while only
one of the trees is in use, so that the times of the other trees grow old. Now and then a few steps are therefore spent
on a tree, or on none, whose best time so far would make it better than the tree in use.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .auto import AutoTree
from .auto_learning import Ratio
from .auto_tables import AcceptanceTable
from .candidate_plans import CandidatePlans
from .candidate_trees import size_of
from .choice import Evidence
from .confidence import RowOutcome
from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .token_tree import TokenTree
from .trials import Trials
from .whole_times import Tree, WholeTimes


class CandidateChoice(CandidatePlans):
    """
    Chooses the tree of every step among `CandidateTrees`: after a few trial steps it follows a plan, until another one
    promises more than `GAIN` times as much.

    Args:
        times (`WholeTimes`): measured times of whole steps on this machine, updated by every step.
        limits (`AutoTree`): largest size of a tree.
        acceptance (`AcceptanceTable`): measured acceptance of the texts, updated by every step.
        is_of_calls (`bool`): whether the choice is of one call of `generate`, in which all rows begin together.
        advantages (`dict[DynamicTree, Ratio]`): what is known of dynamic trees, from all calls.
    """

    reads_confidence = True
    REPLAN, EARLY = 4, 12
    """Steps from one plan to the next; first steps with a new plan each."""
    GAIN = 1.03
    """Factor by which another tree must promise to be better than the planned one."""
    PROBE = 16
    """Fewest steps without a tree after which one carries a small tree, to see whether acceptance has changed."""
    BUDGET = 0.01
    """Largest share of step time that exploration may cost."""
    MEMORY = 1024
    """Number of last steps over which the cost of exploration is averaged (exponentially)."""
    LOOK = 64
    """
    Steps between explorations of trees with old times; the wait until the same tree is explored again doubles each
    time.
    """
    SLOWED = 1.15
    """Slowdown of all steps, since a plain one was timed last, above which a few steps go without a tree."""
    MOST_DOUBLINGS = 5
    STEPS_OF_LOOK = 3

    def __init__(
        self,
        times: WholeTimes,
        limits: AutoTree,
        acceptance: AcceptanceTable,
        is_of_calls: bool = False,
        advantages: dict[DynamicTree, Ratio] | None = None,
    ):
        super().__init__(times, limits, acceptance, advantages)
        self._small = TokenTree.chain(min(2, limits.max_depth))
        self._trials = Trials(limits.first, times)
        self._to_try: list[Tree | None] = []
        self._planned: Tree | None = None
        self._gaining: Tree | None = None
        """The tree of the last step, if that was an exploration that gained: going on costs nothing."""
        # A call that begins without trees tries one at once, where no features wait for a head.
        self._step, self._without = 0, self.PROBE if is_of_calls else 0
        self._look_at, self._slow_look_at = self.LOOK, 0
        self._looks: dict[Tree | None, int] = {}
        self._next_look: dict[Tree | None, int] = {}
        self.explores = False
        """Whether the present step is an exploration: its tree is not the planned one."""
        self._reading = 0.0
        """Extra seconds of the last step in which a head only caught up on pending features."""

    def begin_step(self, length: int, evidence: Evidence | None = None) -> Tree | None:
        self.tree = self._chosen()
        self._pay_for_capture(self.tree)
        self.explores = self.tree != self._planned
        return self.tree

    def begin_next(self) -> bool:
        if self._to_try and self._to_try[0] == self.tree:
            self._to_try.pop(0)
            return True
        if self.explores or self._may_explore or self.tree not in (None, *self._allowed):
            return False
        self._renew_plan()
        if self._planned != self.tree:
            return False
        self._count_step()
        return True

    @property
    def _may_explore(self) -> bool:
        """Whether the next step may be an exploration, so that `begin_step` must be asked."""
        if self._to_try or not self.times.has(None) or self._due:
            return True
        step, is_slow = self._step + 1, self.times.slowed > self.SLOWED
        is_due = step >= self._look_at or (is_slow and step >= self._slow_look_at) or self._without + 1 >= self.PROBE
        return is_due and not self._is_over_budget

    @property
    def _due(self) -> list[Tree | None]:
        """Kinds of steps to time next."""
        due = self._trials.due(self._allowed, self.learning.acceptance.num_drafts)
        return [tree for tree in due if self._may_try(tree)]

    @property
    def _is_over_budget(self) -> bool:
        """Whether exploration has cost so much that there must be none for now."""
        return self.times.lost > self.BUDGET * self.times.spent

    def _chosen(self) -> Tree | None:
        """The tree of this step: the planned one, or one to explore."""
        if not self._to_try:
            self._to_try = [tree for first in self._due[:1] for tree in self._trials.take(first)]
        while self._to_try:
            tree = self._to_try.pop(0)
            if self._may_try(tree):
                return tree
        if self._planned not in (None, *self._allowed):
            self._planned = None
        if not self._may_take(self._planned):
            self._planned = self.plan().tree if self.times.has(None) else None
        gaining, self._gaining, last = self._gaining, None, self._planned
        self._renew_plan()
        self._count_step()
        if not self.times.has(None) or self._is_over_budget:
            return self._planned
        if gaining is not None and self._planned == last and self._may_take(gaining):
            self._without = 0
            return gaining
        if self._without >= self.PROBE:
            self._without = 0
            return self._small if self._may_take(self._small) else min(self._ready_trees, key=size_of, default=None)
        tree = self._planned
        if (
            self._planned is not None
            and self._may_take(None)
            and self.times.slowed > self.SLOWED
            and self._step >= self._slow_look_at
        ):
            self._slow_look_at, tree = self._step + self.LOOK, None
        elif self._step >= self._look_at:
            self._look_at, tree = self._step + self.LOOK, self._worth_a_look()
        if tree != self._planned:
            self._to_try = [tree] * (self.STEPS_OF_LOOK - 1)
        return tree

    def _renew_plan(self) -> None:
        if self._step >= self.EARLY and self._step % self.REPLAN:
            return
        self.learning.renew()
        if not self.times.has(None):
            return
        tree, now = self.plan(captures=True).tree, self.worth(self._planned)
        if self.worth(tree) > self.GAIN * now and not self._may_take(tree):
            steps = 1 if self._step < self.EARLY else self.REPLAN
            lost = steps * self.times.of(self._planned) * (1.0 - now / self.worth(tree))
            self.times.owed[tree] = self.times.owed.get(tree, 0.0) + lost
            tree = self.plan().tree
        if self.worth(tree) > self.GAIN * now:
            self._planned = tree
            self._looks.pop(tree, None)

    def _count_step(self) -> None:
        self._step += 1
        self._without = self._without + 1 if self._planned is None else 0

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        tree = self.tree if draft.num_nodes > 0 else None
        self.times.add(tree, propose + rest, is_whole=False)
        if self.tree is not None:
            if isinstance(self.tree, DynamicTree):
                self.learning.add_dynamic(self.tree, [len(path) for path in paths if path is not None])
            self.learning.acceptance.add(draft, paths)
        if not self.times.are_of_whole_steps:
            self._account(tree, paths, propose + rest)

    def end_whole_step(
        self,
        tree: Tree | None,
        paths: list[list[int] | None],
        seconds: float | None,
        only_read: bool = False,
        outcomes: Sequence[RowOutcome] = (),
    ) -> None:
        """
        Takes the result of a step that ran whole on the device; all nodes of its tree count as drafted.

        Args:
            tree (`TokenTree` or `DynamicTree`, *optional*): tree of the step; None if it had none.
            paths (`list`): for every row the accepted nodes, or None if it rested.
            seconds (`float`, *optional*): duration of the step; None if the measurement is not valid.
            only_read (`bool`, *optional*, defaults to `False`): whether a head caught up on pending features in the
                step, without drafting, so that it took longer than other steps with the tree. In an exploration the
                extra time counts as lost.
            outcomes (`Sequence[RowOutcome]`): the draft's confidence, if it shaped the tree by this; of a dynamic
                tree what came of it.
        """
        self.learning.add(tree, paths, outcomes)
        if only_read and self.times.has(tree):
            if seconds is None:
                seconds = self.times.of(tree) + self._reading
            self._reading = max(seconds - self.times.of(tree), 0.0)
        elif seconds is not None and not only_read:
            self.times.add(tree, seconds)
        self._account(tree, paths, seconds)

    def defer(self) -> None:
        """Plans the tree of the last step again: the last step could not carry it, but the next one can."""
        if self.tree is not None:
            self._to_try.insert(0, self.tree)

    def _worth_a_look(self) -> Tree | None:
        """
        A tree (or None) with an old time that would beat the planned tree at its best time; the planned tree if there
        is none.
        """
        now = self.worth(self._planned)
        old = [
            tree
            for tree in (None, *self._allowed)
            if tree != self._planned and self._may_take(tree)
            if self.times.is_old(tree) and self._step >= self._next_look.get(tree, 0)
        ]
        due = {
            tree: self._worth(tree, tokens / self.times.best_of(tree))
            for tree, tokens in self.learning.expected_tokens(old).items()
        }
        tree = max(due, key=lambda tree: due[tree], default=self._planned)
        if tree == self._planned or due[tree] <= self.GAIN * now:
            return self._planned
        looks = self._looks[tree] = self._looks.get(tree, 0) + 1
        self._next_look[tree] = self._step + (self.LOOK << min(looks, self.MOST_DOUBLINGS))
        return tree

    def _account(self, tree: Tree | None, paths: list[list[int] | None], seconds: float | None) -> None:
        """Adds a step's seconds (None: the expected ones), and the seconds that an exploration lost, to the totals."""
        if not self.times.has(self._planned) or not self.times.has(tree):
            return
        seconds = self.times.of(tree) if seconds is None else seconds
        kept, times = 1.0 - 1.0 / self.MEMORY, self.times
        times.spent, times.lost = kept * times.spent + seconds, kept * times.lost
        if self.explores:
            taken = [len(path) for path in paths if path is not None]
            tokens = 1.0 + (statistics.mean(taken) if taken else 0.0)
            lost = seconds - tokens / self.rate(self._planned)
            times.lost = max(times.lost + lost, -times.of(None))
            self._gaining = tree if lost < 0.0 else None
