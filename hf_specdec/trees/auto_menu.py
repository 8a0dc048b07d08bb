"""
`tree="auto"` where steps are captured: a choice among a few trees, each timed as a whole.

A tree costs a capture, so that there are few, the same for every text. How long a step with each takes depends on the
load, which changes while only one of the trees is in use. So what is known of the others grows old: now and then a few
steps are spent on a tree, or on none, that did so well once that it would be better than what is in use.
"""

from __future__ import annotations

import statistics
from collections import deque

from .auto import AutoTree, Plan, StepTimes
from .auto_tables import AcceptanceTable, TimeTable, expected_length, likeliest_paths
from .choice import TreeChoice
from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .token_tree import TokenTree


FEW_NODES = 4
"""So many are checked in the time of a root alone."""


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


class WholeTimes:
    """
    Seconds that steps take with each tree. The first times of a tree, as of warming up, are its own for good; the load
    makes all steps slower, by a factor that is known best of what is in use. It is believed of the others, too, the
    more the fewer and older the times that say how much slower these are.
    """

    FIRST = 3
    """Times that are a tree's own, of which the median counts."""
    BELIEF = 1.0
    """How many times of a tree the factor of all steps counts for."""
    OLD = 64
    """Steps after which a time is worth another look: the next one counts without it."""
    HALF_LIFE = 1024
    """Steps in which a time loses half its weight."""

    def __init__(self) -> None:
        self.are_of_whole_steps = False
        """Whether they are those of steps that the device does as a whole; before the first of these, of others."""
        self._clear()

    def _clear(self) -> None:
        self.steps = 0
        """Steps that were timed."""
        self._first: dict[TokenTree | None, list[float]] = {}
        self._recent: dict[TokenTree | None, deque[tuple[int, float]]] = {}
        self._of_all: deque[float] = deque(maxlen=31)
        self._of_all_then: float | None = None
        self._best: dict[TokenTree | None, float] = {}
        self._likely = StepTimes()

    @property
    def are_known(self) -> bool:
        """Whether steps with and without a tree were timed: else the one would be judged by the other."""
        return self._likely.are_known

    @property
    def reach(self) -> int:
        """Most nodes of trees of which it can be told what is likely."""
        return max(2 * self._likely.rest.largest, 4)

    def has(self, tree: TokenTree | None) -> bool:
        """Whether any step with it was timed."""
        return tree in self._first

    def add(self, tree: TokenTree | None, seconds: float, is_whole: bool = True) -> None:
        """Adds what a step has taken: those that the device does as a whole are so much faster that they go alone."""
        if is_whole and not self.are_of_whole_steps:
            self._clear()
            self.are_of_whole_steps = True
        if not is_whole and self.are_of_whole_steps:
            return
        self.steps += 1
        first = self._first.setdefault(tree, [])
        if len(first) < self.FIRST:
            first.append(seconds)
        factor = seconds / statistics.median(first)
        if self.is_old(tree):
            self._recent[tree].clear()
        self._recent.setdefault(tree, deque(maxlen=TimeTable.RECENT)).append((self.steps, factor))
        self._of_all.append(factor)
        if tree is None:
            self._of_all_then = statistics.median(self._of_all)
        self._best[tree] = min(self._best.get(tree, seconds), seconds)
        self._learn_what_is_likely(tree, seconds)

    def of(self, tree: TokenTree | None) -> float:
        """What a step with it takes at present."""
        if tree not in self._first:
            return self._likely.of(tree)
        own, of_all = statistics.median(factor for _, factor in self._recent[tree]), statistics.median(self._of_all)
        age = self.steps - self._recent[tree][-1][0]
        weight = len(self._recent[tree]) * 0.5 ** (age / self.HALF_LIFE)
        factor = (weight * own + self.BELIEF * of_all) / (weight + self.BELIEF)
        return statistics.median(self._first[tree]) * factor

    def best_of(self, tree: TokenTree | None) -> float:
        """The least that a step with it has taken."""
        return self._best.get(tree, self.of(tree))

    def is_old(self, tree: TokenTree | None) -> bool:
        """Whether the last step with it, if there was any, is long past."""
        return tree in self._recent and self.steps - self._recent[tree][-1][0] > self.OLD

    @property
    def slowed(self) -> float:
        """How many times as long all steps take as when one without a tree was timed last."""
        return 1.0 if self._of_all_then is None else statistics.median(self._of_all) / self._of_all_then

    def _learn_what_is_likely(self, tree: TokenTree | None, seconds: float) -> None:
        """
        With few nodes drafting is what a step takes more than one without a tree; with more it is what is known of the
        depth.
        """
        propose, rest = self._likely.propose, self._likely.rest
        if tree is None:
            propose.add(0, 0.0)
            rest.add(0, seconds)
        elif tree.num_nodes <= FEW_NODES and rest.has(0):
            checking = rest.up_to(tree.num_nodes)[-1]
            propose.add(tree.depth, max(seconds - checking, 0.0))
            rest.add(tree.num_nodes, checking)
        else:
            drafting = propose.up_to(tree.depth)[-1] if propose.has(0) else 0.0
            rest.add(tree.num_nodes, max(seconds - drafting, 0.0))


class MenuChoice(TreeChoice):
    """
    Chooses the tree of every step.

    Args:
        times (`WholeTimes`): what is known of the machine; goes on learning.
        limits (`AutoTree`): how large a tree may be.
        acceptance (`AcceptanceTable`): what is known of the texts; goes on learning.
    """

    REPLAN = 4
    """Steps between two plans."""
    GAIN = 1.03
    """How much better another tree must promise to be."""
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
    PROBE = 16
    """Steps without trees, at least, after which one carries a small tree, to see whether the text has changed."""
    LOOK = 64
    """Steps after which a few may be spent on a tree whose time is old; for the same tree twice as many next time."""
    SLOWED = 1.15
    """As soon as all steps have become so much slower, a few go without a tree."""
    MOST_DOUBLINGS = 5
    STEPS_OF_LOOK = 3

    def __init__(self, times: WholeTimes, limits: AutoTree, acceptance: AcceptanceTable):
        super().__init__(None)
        self.times, self.acceptance = times, acceptance
        self.menu = TreeMenu(limits, times)
        self._small = TokenTree.chain(min(2, limits.max_depth))
        middling = min(self.menu.trees, key=lambda tree: (abs(tree.num_nodes - 8), tree.depth))
        self._trials = [None, self._small, None, self._small, middling, middling]
        self._to_try: list[TokenTree | None] = [] if times.are_known else list(self._trials)
        self._rounds = 1
        self._planned: TokenTree | None = None
        self._step = self._without = 0
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
        if self._step % self.REPLAN == 0 and self.times.has(None):
            plan = self.plan()
            if self.worth(plan.tree) > self.GAIN * self.worth(self._planned):
                self._planned = plan.tree
                self._looks.pop(plan.tree, None)
        self._step += 1
        self._without = self._without + 1 if self._planned is None else 0
        if not self.times.has(None) or self._lost > self.BUDGET * self._spent:
            return self._planned
        if self._without >= self.PROBE:
            self._without = 0
            return self._small
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

    def end_whole_step(self, tree: TokenTree | None, paths: list[list[int] | None], seconds: float | None) -> None:
        """
        The same for a step that the device has done as a whole. All nodes of the tree count as drafted. None for
        `seconds` that tell nothing of it.
        """
        if seconds is not None:
            self.times.add(tree, seconds)
        if tree is not None:
            self.acceptance.add_whole(tree, paths)
        self._account(tree, paths, seconds)

    def put_off(self) -> None:
        """The step that ended could not carry its tree, but the next one can: it is to be the same."""
        if self.tree is not None:
            assert not isinstance(self.tree, DynamicTree)
            self._to_try.insert(0, self.tree)

    def plan(self) -> Plan:
        """The best plan now; trees of far more nodes than were ever timed are left for later."""
        trees = [tree for tree in self._allowed if self.times.has(tree) or tree.num_nodes <= self.times.reach]
        chances = self.acceptance.chances()
        plans = [Plan(tree, _tokens(tree, chances) / self.times.of(tree)) for tree in (None, *trees)]
        return max(plans, key=lambda plan: plan.tokens_per_second / self._price(plan.tree))

    def rate(self, tree: TokenTree | None) -> float:
        """Tokens per second that a tree promises now."""
        return _tokens(tree, self.acceptance.chances()) / self.times.of(tree)

    def worth(self, tree: TokenTree | None) -> float:
        """By which trees, and none, are compared."""
        return self.rate(tree) / self._price(tree)

    def _price(self, tree: TokenTree | None) -> float:
        return 1.0 if tree is None else self.WORTH

    @property
    def _allowed(self) -> list[TokenTree]:
        return [tree for tree in self.menu.trees if self.most_nodes is None or tree.num_nodes <= self.most_nodes]

    def _worth_a_look(self) -> TokenTree | None:
        """What might do better than the planned tree, if anything that was not timed for long; else that."""
        now, chances = self.worth(self._planned), self.acceptance.chances()
        due = {
            tree: _tokens(tree, chances) / self.times.best_of(tree) / self._price(tree)
            for tree in (None, *self._allowed)
            if tree != self._planned and self.times.is_old(tree) and self._step >= self._next_look.get(tree, 0)
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


def _tokens(tree: TokenTree | None, chances: list[list[float]]) -> float:
    """Expected tokens of a step."""
    return expected_length(() if tree is None else tree.paths, chances)
