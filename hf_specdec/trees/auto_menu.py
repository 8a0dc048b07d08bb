"""
`tree="auto"` where steps are captured: a choice among a few trees, each timed as a whole.

A tree costs a capture, so that there are few, the same for every text. How long a step with each takes depends on the
load, which changes while only one of the trees is in use. So what is known of the others grows old: now and then a few
steps are spent on a tree, or on none, that did so well once that it would be better than what is in use.
"""

from __future__ import annotations

import statistics

from .auto import AutoTree
from .auto_tables import AcceptanceTable, likeliest_paths
from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .planned_choice import Plan, PlannedChoice
from .token_tree import TokenTree
from .whole_times import WholeTimes


class TreeMenu:
    """
    The trees: the likeliest paths of drafts that are sure of themselves (deep trees), middling, and unsure (broad
    ones).

    Args:
        limits (`AutoTree`): how large a tree may be.
        times (`WholeTimes`): of steps with them. Once some have been timed, when graphs were captured, the others are
            not worth a capture.
    """

    FEWEST = 3
    """Trees that have been timed, of which it can choose."""
    DRAFTS = (
        ((0.85, 0.06, 0.03, 0.02, 0.01), (1, 2, 4, 8, 16, 32)),
        (AcceptanceTable.FIRST_GUESS, (8, 16, 32, 64)),
        ((0.35, 0.15, 0.1, 0.07, 0.05), (2, 4)),
    )
    """The chances of the ranks, and the numbers of nodes of trees for them."""

    def __init__(self, limits: AutoTree, times: WholeTimes | None = None):
        found: dict[TokenTree, None] = {}
        for chances, sizes in self.DRAFTS:
            table = [list(chances[: limits.max_children])] * limits.max_depth
            for size in sizes:
                likeliest = likeliest_paths(table, min(size, limits.max_nodes), limits.max_depth)
                found[TokenTree([path for _, path in likeliest])] = None
        timed = [] if times is None else [tree for tree in found if times.has(tree)]
        trees = timed if len(timed) >= self.FEWEST else found
        self.trees = sorted(trees, key=lambda tree: (tree.num_nodes, tree.depth))


class MenuChoice(PlannedChoice):
    """
    Chooses the tree of every step.

    Args:
        times (`WholeTimes`): what is known of the machine; goes on learning.
        limits (`AutoTree`): how large a tree may be.
        acceptance (`AcceptanceTable`): what is known of the texts; goes on learning.
    """

    WORTH = 1.05
    """
    How much more any tree must promise than none. A load slows steps with trees by more than plain ones, of which
    nothing is measured meanwhile: a tree that promises little may well lose.
    """
    ROUNDS = 3
    """So often all kinds of steps are tried where nobody times them: what is captured, or beside others' trees."""
    BUDGET = 0.01
    """Of the time, as much may be lost by steps that are there to find something out …"""
    MEMORY = 1024
    """… among the last so many steps."""
    LOOK = 64
    """Steps after which a few may be spent on a tree whose time is old; for the same tree twice as many next time."""
    SLOWED = 1.15
    """As soon as all steps have become so much slower, a few go without a tree."""
    MOST_DOUBLINGS = 5
    STEPS_OF_LOOK = 3

    def __init__(self, times: WholeTimes, limits: AutoTree, acceptance: AcceptanceTable):
        self.menu = TreeMenu(limits, times)
        middling = min(self.menu.trees, key=lambda tree: (abs(tree.num_nodes - 8), tree.depth))
        super().__init__(times, acceptance, limits.max_depth, middling)
        self._rounds = 1
        self._look_at, self._slow_look_at = self.LOOK, 0
        self._looks: dict[TokenTree | None, int] = {}
        self._next_look: dict[TokenTree | None, int] = {}
        self._explores = False
        """Whether the present step is there to find something out."""
        self._spent = self._lost = 0.0
        """
        Seconds of all steps, and by how much those that were there to find something out took longer than planned ones
        for as many tokens; the older, the less they count.
        """
        self._reading = 0.0
        """Seconds by which the last step was longer in which a head only read."""
        self.most_nodes: int | None = None
        """Most draft tokens of a row of the step to come."""

    def begin_step(self, length: int) -> TokenTree | None:
        self.tree = self._chosen()
        self._explores = self.tree != self._planned
        return self.tree

    def _chosen(self) -> TokenTree | None:
        """The tree of this step: what is planned, or what something is to be found out about."""
        if not self._to_try and not self.times.are_known and self._rounds < self.ROUNDS:
            self._rounds += 1
            self._to_try = list(self._trials)  # nobody has timed them
        if self._to_try:
            return self._to_try.pop(0)
        if self._planned not in (None, *self._allowed):
            self._planned = None
        before = self._planned
        self._go_by_plan()
        if self._planned != before:
            self._looks.pop(self._planned, None)
        if not self.times.has(None) or self._lost > self.BUDGET * self._spent:
            return self._planned
        if self._without >= self.PROBE:
            return self._probe()
        tree = self._planned
        if self._planned is not None and self.times.slowed > self.SLOWED and self._step >= self._slow_look_at:
            self._slow_look_at, tree = self._step + self.LOOK, None
        elif self._step >= self._look_at:
            self._look_at, tree = self._step + self.LOOK, self._worth_a_look()
        if tree != self._planned:
            self._to_try = [tree] * (self.STEPS_OF_LOOK - 1)
        return tree

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        assert not isinstance(self.tree, DynamicTree)
        tree = self.tree if draft.num_nodes > 0 else None
        self.times.add(tree, propose + rest, is_whole=False)
        if self.tree is not None:
            self.acceptance.add(draft, paths)
        if not self.times.are_of_whole_steps:
            self._account(tree, paths, propose + rest)

    def end_whole_step(
        self, tree: TokenTree | None, paths: list[list[int] | None], seconds: float | None, only_read: bool = False
    ) -> None:
        """
        The same for a step that the device has done as a whole. All nodes of the tree count as drafted. None for
        `seconds` that tell nothing of it. `only_read`: a head has read in it for trees to come, so that it took longer
        than others like it. A step that is there to find something out pays for that.
        """
        if tree is not None:
            self.acceptance.add_whole(tree, paths)
        if only_read and self.times.has(tree):
            if seconds is None:
                seconds = self.times.of(tree) + self._reading
            self._reading = max(seconds - self.times.of(tree), 0.0)
        elif seconds is not None and not only_read:
            self.times.add(tree, seconds)
        self._account(tree, paths, seconds)

    def put_off(self) -> None:
        """The step that ended could not carry its tree, but the next one can: it is to be the same."""
        if self.tree is not None:
            assert not isinstance(self.tree, DynamicTree)
            self._to_try.insert(0, self.tree)

    def plan(self) -> Plan:
        """The best plan now; trees of far more nodes than were ever timed are left for later."""
        trees = [tree for tree in self._allowed if self.times.has(tree) or tree.num_nodes <= self.times.reach]
        plans = (Plan(tree, rate) for tree, rate in self.rates((None, *trees)).items())
        return max(plans, key=lambda plan: plan.tokens_per_second / self._price(plan.tree))

    def worth(self, tree: TokenTree | None) -> float:
        return self.rate(tree) / self._price(tree)

    def _price(self, tree: TokenTree | None) -> float:
        return 1.0 if tree is None else self.WORTH

    @property
    def _allowed(self) -> list[TokenTree]:
        return [tree for tree in self.menu.trees if self.most_nodes is None or tree.num_nodes <= self.most_nodes]

    def _worth_a_look(self) -> TokenTree | None:
        """What might do better than the planned tree, if anything that was not timed for long; else that."""
        now = self.worth(self._planned)
        old = [
            tree
            for tree in (None, *self._allowed)
            if tree != self._planned and self.times.is_old(tree) and self._step >= self._next_look.get(tree, 0)
        ]
        due = {
            tree: tokens / self.times.best_of(tree) / self._price(tree)
            for tree, tokens in self.expected_tokens(old).items()
        }
        tree = max(due, key=lambda tree: due[tree], default=self._planned)
        if tree == self._planned or due[tree] <= self.GAIN * now:
            return self._planned
        looks = self._looks[tree] = self._looks.get(tree, 0) + 1
        self._next_look[tree] = self._step + (self.LOOK << min(looks, self.MOST_DOUBLINGS))
        return tree

    def _account(self, tree: TokenTree | None, paths: list[list[int] | None], seconds: float | None) -> None:
        """Notes what a step has taken (None: nobody knows), and what of it was lost."""
        if not self.times.has(self._planned) or not self.times.has(tree):
            return
        seconds = self.times.of(tree) if seconds is None else seconds
        kept = 1.0 - 1.0 / self.MEMORY
        self._spent, self._lost = kept * self._spent + seconds, kept * self._lost
        if self._explores:
            taken = [len(path) for path in paths if path is not None]
            tokens = 1.0 + (statistics.mean(taken) if taken else 0.0)
            self._lost = max(self._lost + seconds - tokens / self.rate(self._planned), 0.0)
